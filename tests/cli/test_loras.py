"""`diffleet loras`, and `generate --lora`, against a live fleet."""

import pytest

from shared.cli.loras import use_of
from tests.cli.fleet_process import Up, diffleet


@pytest.mark.slow
def test_an_adapter_is_added_listed_used_and_removed(live_fleet: Up) -> None:
    where = ("--url", live_fleet.url)
    added = diffleet("loras", "add", "red", "fox", *where)
    assert added.returncode == 0, added.stderr
    assert added.stdout.startswith("demo:red  rank 4, ")
    ask = ("generate", "Where is the mouse?", "--max-tokens", "12")
    base = diffleet(*ask, *where)
    under = {
        through: diffleet(*ask, "--lora", "red:0.5", *through)
        for through in (where, ("--redis-url", live_fleet.redis_url))
    }
    assert {done.returncode for done in under.values()} == {0}, [done.stderr for done in under.values()]
    assert len({done.stdout for done in under.values()}) == 1
    assert base.stdout not in {done.stdout for done in under.values()}
    listed = diffleet("loras", "list", *where)
    (line,) = [line for line in listed.stdout.splitlines() if line.startswith("red ")]
    assert "fox" in line and " - " not in line, "the worker that has run it has it loaded"
    removed = diffleet("loras", "remove", "red", *where)
    assert (removed.returncode, removed.stdout) == (0, "demo:red  forgotten; its files stay\n")


@pytest.mark.slow
def test_what_is_wrong_with_an_adapter_is_said_with_4(live_fleet: Up) -> None:
    where = ("--url", live_fleet.url)
    outside = diffleet("loras", "add", "red", "../fox", *where)
    gone = diffleet("loras", "remove", "blue", *where)
    over_http = diffleet("generate", "hi", "--lora", "blue", *where)
    over_redis = diffleet("generate", "hi", "--lora", "blue", "--redis-url", live_fleet.redis_url)
    for ended, said in ((outside, "path: must name"), (gone, "'blue'"), (over_http, "'blue'"), (over_redis, "'blue'")):
        assert ended.returncode == 4 and said in ended.stderr, ended.stderr
        assert ended.stdout == ""


@pytest.mark.parametrize("argument", ["", ":1", "fox:", "fox:red", "fox:1:2"])
def test_what_is_no_adapter_and_scale_is_refused(argument: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        use_of(argument)
    ended = diffleet("generate", "hi", "--lora", argument)
    assert ended.returncode == 2 and "--lora" in ended.stderr


def test_a_scale_may_be_left_out_and_may_be_negative() -> None:
    assert (use_of("fox"), use_of("fox:-0.5")) == (("fox", 1.0), ("fox", -0.5))
