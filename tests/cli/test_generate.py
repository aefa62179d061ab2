"""`diffleet generate` and its siblings against a live fleet."""

import json
import socket
import threading
from pathlib import Path

import pytest

from tests.cli.fleet_process import Up, diffleet

pytestmark = pytest.mark.slow

CUT = "diffleet: cut: the answer has as many tokens as it may (--max-tokens, or /set max_tokens, allows more)\n"


def test_http_and_redis_give_the_same_answer_once(live_fleet: Up) -> None:
    question = ("Where is the mouse?", "--max-tokens", "12", "--seed", "5", "--temperature", "0.8")
    over_http = diffleet("generate", *question, "--url", live_fleet.url)
    over_redis = diffleet("generate", *question, "--redis-url", live_fleet.redis_url)
    assert (over_http.returncode, over_redis.returncode) == (0, 0), over_http.stderr + over_redis.stderr
    assert over_http.stdout == over_redis.stdout
    assert over_http.stdout.strip()
    assert over_http.stderr == over_redis.stderr == CUT


def test_watch_on_a_pipe_prints_the_answer_and_its_costs_and_draws_nothing(live_fleet: Up) -> None:
    question = ("Where?", "--max-tokens", "8", "--url", live_fleet.url)
    plain, watched = diffleet("generate", *question), diffleet("generate", *question, "--watch")
    assert watched.stdout == plain.stdout
    assert "8 tokens" in watched.stderr and "tokens/forward" in watched.stderr
    assert "\x1b" not in watched.stdout + watched.stderr


def test_options_reach_the_model(live_fleet: Up) -> None:
    common = ("generate", "Where?", "--url", live_fleet.url, "--max-tokens", "16", "--watch")
    at_once, one_by_one = diffleet(*common, "--threshold", "0"), diffleet(*common, "--threshold", "1")
    longer = diffleet(*common, "--threshold", "0", "--block-length", "8")
    assert forwards(one_by_one.stderr) > forwards(at_once.stderr) > forwards(longer.stderr)


def test_options_of_a_strategy_reach_the_model_by_http_and_redis(live_fleet: Up) -> None:
    common = ("generate", "Where?", "--max-tokens", "16", "--watch", "--seed", "1", "--block-length", "8")
    for where in (("--url", live_fleet.url), ("--redis-url", live_fleet.redis_url)):
        told = {
            steps: diffleet(*common, *where, "--strategy", "low_confidence_static", "--set", f"steps={steps}").stderr
            for steps in (2, 8)
        }
        assert "16 tokens" in told[2] and forwards(told[8]) > forwards(told[2])
        own = diffleet(*common, *where, "--set", "confidence=tempered", "--set", "threshold=0")
        assert own.returncode == 0 and forwards(own.stderr) < forwards(told[8])
        foreign = diffleet(*common, *where, "--set", "bound=0.5")
        assert foreign.returncode == 4
        assert foreign.stderr.startswith("diffleet: --set bound does not apply to strategy ")


def forwards(told: str) -> int:
    return int(told.split(" forwards")[0].rsplit(" ", 1)[1])


@pytest.mark.parametrize("through", ["http", "redis"])
def test_a_prompt_from_standard_input_is_taken_as_it_stands_if_raw(live_fleet: Up, through: str) -> None:
    where = ("--url", live_fleet.url) if through == "http" else ("--redis-url", live_fleet.redis_url)
    common = (*where, "--max-tokens", "12")
    raw = diffleet("generate", "-", "--raw", *common, stdin="Once upon\n")
    same = diffleet("generate", "Once upon", "--raw", *common)
    chat = diffleet("generate", "Once upon", *common)
    assert raw.returncode == 0 and raw.stdout == same.stdout
    assert raw.stdout != chat.stdout


@pytest.mark.parametrize("through", ["http", "redis"])
def test_what_the_fleet_refuses_ends_with_4_and_says_why(live_fleet: Up, through: str) -> None:
    where = ("--url", live_fleet.url) if through == "http" else ("--redis-url", live_fleet.redis_url)
    unknown = diffleet("generate", "hi", "--model", "nobody", *where)
    too_long = diffleet("generate", "-", *where, stdin="mouse " * 5000)
    assert (unknown.returncode, too_long.returncode) == (4, 4), unknown.stderr + too_long.stderr
    assert "model" in unknown.stderr and "tokens" in too_long.stderr
    assert unknown.stdout == too_long.stdout == ""


@pytest.mark.parametrize("through", ["http", "redis"])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "99"), ("--seed", "9" * 20), ("--block-length", "9999"), ("--strategy", "x")],
)
def test_a_value_that_the_fleet_refuses_is_told_with_its_option(
    live_fleet: Up, through: str, option: str, value: str
) -> None:
    where = ("--url", live_fleet.url) if through == "http" else ("--redis-url", live_fleet.redis_url)
    done = diffleet("generate", "hi", option, value, *where)
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith(f"diffleet: {option}") and len(done.stderr.splitlines()) == 1


def test_no_fleet_ends_with_3_and_says_how_to_start_one() -> None:
    ended = diffleet("generate", "hi", "--url", "http://127.0.0.1:1")
    assert ended.returncode == 3
    assert "no fleet answers at http://127.0.0.1:1" in ended.stderr and "diffleet up" in ended.stderr
    ended = diffleet("generate", "hi", "--redis-url", "redis://127.0.0.1:1/0")
    assert ended.returncode == 3
    assert ended.stderr.startswith("diffleet: no Redis answers")


@pytest.mark.parametrize(
    ("place", "complaint"), [("unix://nobody:secret@{}", "other credentials"), ("unix://{}?db=99", "no such database")]
)
@pytest.mark.parametrize("command", [("generate", "hi"), ("top", "--once"), ("requests",)])
def test_a_redis_that_turns_its_caller_away_is_told_in_one_line(
    redis_url: str, command: tuple[str, ...], place: str, complaint: str
) -> None:
    url = place.format(redis_url.removeprefix("unix://"))
    ended = diffleet(*command, "--redis-url", url)
    assert ended.returncode == 3
    assert ended.stderr.startswith("diffleet: this Redis") and complaint in ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and "secret" not in ended.stderr


@pytest.mark.parametrize("flags", [("--url", "ftp://x"), ("--redis-url", "http://x"), ("--max-tokens", "0")])
def test_a_wrong_option_ends_with_2(flags: tuple[str, str]) -> None:
    ended = diffleet("generate", "hi", *flags)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                chunk = {"choices": [{"delta": {"content": "half an ans"}}]}
                head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
                connection.sendall(head + b"data: " + json.dumps(chunk).encode() + b"\n\n")
                # Read to the end: what is left unread when a socket closes makes it a reset instead of an end.
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        ended = diffleet("generate", "hi", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(timeout=30)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "ended before the answer did" in ended.stderr


def test_models_lists_those_of_the_fleet(live_fleet: Up) -> None:
    listed = diffleet("models", "--url", live_fleet.url)
    assert listed.returncode == 0
    assert f"fleet at {live_fleet.url}: demo" in listed.stdout


def test_help_names_every_command_and_exit_code() -> None:
    told = diffleet("--help")
    assert told.returncode == 0
    for word in ("up", "generate", "api", "worker", "models", "eval", "UNREACHABLE", "130"):
        assert word in told.stdout


@pytest.mark.parametrize("process", ["api", "worker", "jobs"])
def test_the_help_of_a_process_names_environment_variables_and_no_types_of_the_program(process: str) -> None:
    told = " ".join(diffleet(process, "--help").stdout.split())
    assert "[env: DIFFLEET_REDIS_URL]" in told and "--redis-password TEXT" in told
    for leak in ("tuple[", "SecretStr", "(default: null)", " str ", " int ", " float ", " Path "):
        assert leak not in told
    if process != "worker":
        assert "--cors-origins TEXT,..." in told


@pytest.mark.parametrize("process", ["api", "worker"])
def test_flags_of_the_processes_are_passed_on(process: str) -> None:
    told = diffleet(process, "--help")
    assert told.returncode == 0 and "--redis-url" in told.stdout
    wrong = diffleet(process, "--no-such-flag", "1")
    assert wrong.returncode == 2 and "no-such-flag" in wrong.stderr


@pytest.mark.parametrize("through", ["http", "redis"])
@pytest.mark.parametrize("form", ["given", "file"])
def test_a_schema_is_followed(live_fleet: Up, through: str, form: str, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    text = json.dumps(schema | {"additionalProperties": False})
    if form == "file":
        (tmp_path / "schema.json").write_text(text)
        text = str(tmp_path / "schema.json")
    where = ("--url", live_fleet.url) if through == "http" else ("--redis-url", live_fleet.redis_url)
    done = diffleet("generate", "Where?", "--max-tokens", "32", "--json-schema", text, *where)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["ok"], bool)


@pytest.mark.parametrize("schema", ["{", "[1]", "no-such-file.json"])
def test_what_is_no_schema_ends_with_2(schema: str) -> None:
    done = diffleet("generate", "x", "--json-schema", schema)
    assert done.returncode == 2 and "--json-schema" in done.stderr
