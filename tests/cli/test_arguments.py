"""Arguments that are wrong are refused by name, before anything is started."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from shared.cli import commands
from shared.cli.answer import show_answer
from shared.cli.canvas import Canvas
from shared.cli.doctor import Finding, Verdict, print_findings
from shared.cli.exits import Exit
from shared.cli.question import as_typed
from shared.cli.strategy_options import options_from
from shared.decoding import KINDS
from tests.cli.fleet_process import diffleet

NOBODY = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("more", [[], ["--redis-url", NOBODY]])
@pytest.mark.parametrize("command", [["generate"], ["models", "--url"], ["generate", "hi", "--model"]])
def test_an_argument_that_is_not_utf_8_is_refused_in_one_line(command: list[str], more: list[str]) -> None:
    ended = CliRunner().invoke(commands.app, [*command, "\udcff\udcfe hi", *more])
    assert ended.exit_code == Exit.USAGE
    assert ended.stderr.rstrip().endswith("is not UTF-8")


def test_bytes_of_a_shell_that_are_not_utf_8_are_refused_without_a_traceback() -> None:
    ended = diffleet("generate", "\udcff hi")
    assert ended.returncode == Exit.USAGE
    assert "Traceback" not in ended.stderr and "argument 2 is not UTF-8" in ended.stderr


def float_options(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the words of each command, and the options of it that are numbers with a point."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from float_options(inner, (*words, name))
    hints = get_type_hints(command.callback) if command.callback else {}
    for parameter in command.params:
        hint = hints.get(parameter.name)
        if float in (hint, *get_args(hint)):
            yield words, parameter.opts[0]


FLOAT_OPTIONS = list(float_options(typer.main.get_command(commands.app)))


def test_options_that_are_numbers_are_found() -> None:
    assert {(("generate",), "--temperature"), (("chat",), "--threshold"), (("bench",), "--burstiness")} <= set(
        FLOAT_OPTIONS
    )


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "1e999"])
@pytest.mark.parametrize(("words", "option"), FLOAT_OPTIONS)
def test_no_option_takes_a_number_that_is_not_finite(words: tuple[str, ...], option: str, value: str) -> None:
    more = ["x"] if words == ("generate",) else []
    ended = CliRunner().invoke(commands.app, [*words, *more, f"{option}={value}"])
    assert ended.exit_code == Exit.USAGE
    assert option in ended.stderr and ("must be a finite number" in ended.stderr or "Input should be" in ended.stderr)


def path_options(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the words of each command, and the options of it that are paths."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from path_options(inner, (*words, name))
    hints = get_type_hints(command.callback) if command.callback else {}
    for parameter in command.params:
        hint = hints.get(parameter.name)
        if Path in (hint, *get_args(hint)):
            yield words, parameter.opts[0]


PATH_OPTIONS = [
    *path_options(typer.main.get_command(commands.app)),
    (("up",), "--model"),
    (("up", "--fake"), "--model"),
]


def test_options_that_are_paths_are_found() -> None:
    assert {(("up",), "--data-dir"), (("up",), "--model-store"), (("bench",), "--json")} <= set(PATH_OPTIONS)


@pytest.mark.parametrize(
    ("value", "why"), [("", "is empty"), ("~nobody-here/x", "no home folder is known for '~nobody-here'")]
)
@pytest.mark.parametrize(("words", "option"), PATH_OPTIONS)
def test_no_option_takes_a_path_that_is_none(words: tuple[str, ...], option: str, value: str, why: str) -> None:
    more = ["x"] if words == ("abort",) else []
    ended = CliRunner().invoke(commands.app, [*words, *more, f"{option}={value}"])
    assert ended.exit_code == Exit.USAGE
    assert option in ended.stderr and why in ended.stderr


def test_a_data_folder_behind_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    ended = CliRunner().invoke(commands.app, ["doctor", f"--data-dir={loop}"])
    assert ended.exit_code == Exit.USAGE and "--data-dir" in ended.stderr and "loop of links" in ended.stderr


@pytest.mark.parametrize("option", ["--lora=fox:inf", "--lora=fox:nan", '--json-schema={"minimum": NaN}'])
def test_no_part_of_an_option_is_a_number_that_is_not_finite(option: str) -> None:
    ended = CliRunner().invoke(commands.app, ["generate", "x", "--url", "http://127.0.0.1:1", option])
    assert ended.exit_code == Exit.USAGE and option.partition("=")[0] in ended.stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_bench_refuses_a_file_that_it_could_not_write_before_it_measures(option: str, tmp_path: Path) -> None:
    if option == "--plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / "nowhere" / "x"
    ended = CliRunner().invoke(commands.app, ["bench", "--url", "http://127.0.0.1:1", option, str(path)])
    assert (ended.exit_code, ended.stderr) == (Exit.USAGE, f"diffleet: {option}: {path}: No such file or directory\n")


def test_bench_that_measures_nothing_leaves_no_file_and_keeps_a_former_one(tmp_path: Path) -> None:
    former = tmp_path / "former"
    former.write_text("kept")
    for path in (former, tmp_path / "new"):
        ended = CliRunner().invoke(commands.app, ["bench", "--url", "http://127.0.0.1:1", "--json", str(path)])
        assert ended.exit_code == Exit.UNREACHABLE
    assert former.read_text() == "kept" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--concurrency", "x", "'x' is not a whole number"),
        ("--concurrency", "1,0", "0 is below 1"),
        ("--rate", "x", "'x' is not a number"),
        ("--rate", "nan", "'nan' is not a number"),
        ("--prompt-tokens", "x", "'x' is not a whole number"),
        ("--output-tokens", "8-x", "'x' is not a whole number"),
    ],
)
def test_bench_refuses_what_is_no_number_in_the_words_of_who_typed_it(option: str, value: str, why: str) -> None:
    ended = CliRunner().invoke(commands.app, ["bench", "--url", "http://127.0.0.1:1", option, value])
    assert (ended.exit_code, ended.stderr) == (Exit.USAGE, f"diffleet: {option}: {why}\n")


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("guided_json: it cannot be met", "--json-schema: it cannot be met"),
        ("temperature must be less than or equal to 5", "--temperature must be less than or equal to 5"),
        ("there is no such adapter 'max_tokens' (lora[0].name)", "there is no such adapter 'max_tokens' (--lora)"),
        ("prompt is 5 tokens and max_tokens is 9: 14", "prompt is 5 tokens and --max-tokens is 9: 14"),
        ("diffusion.threshold: not with sequential", "--threshold: not with sequential"),
        ("diffusion.eps is not a known option", "--set eps is not a known option"),
        (
            "diffusion.steps does not apply to strategy factor; set diffusion.strategy to one that has it",
            "--set steps does not apply to strategy factor; set --strategy to one that has it",
        ),
        ("diffusion.template[0] is empty", "diffusion.template[0] is empty"),
        ("there is no model 'seed': the models are demo", "there is no model 'seed': the models are demo"),
    ],
)
def test_a_complaint_of_the_fleet_names_the_option_that_was_typed(told: str, shown: str) -> None:
    assert as_typed(told) == shown


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["steps"], "'steps' is not NAME=VALUE"),
        (["steps=2", "steps=3"], "steps is given twice"),
        (["speed=2"], "'speed' is none of the options that the strategies have: block_cache, bound, "),
        (["--strategy=factor", "steps=2"], "'steps' is none of the options that strategy factor has: confidence, "),
        (["strategy=factor"], "'strategy' is none of the options"),
        (["steps=0"], "steps must be greater than or equal to 1"),
        (["steps=many"], "steps must be an integer"),
        (["max_blocks=2.5"], "max_blocks must be an integer"),
        (["tau_acc=2"], "tau_acc must be less than or equal to 1"),
        (["bound=1e999"], "bound must be a finite number"),
        (["bound=NaN"], "bound must be a finite number"),
        (["fallback=rightmost"], "fallback must be 'confidence' or 'leftmost'"),
        (["--threshold=0.5", "threshold=0.7"], "threshold is given by --threshold too"),
    ],
)
def test_a_wrong_option_of_a_strategy_is_named_before_anything_is_asked(given: list[str], told: str) -> None:
    options = [one if one.startswith("--") else f"--set={one}" for one in given]
    ended = CliRunner().invoke(commands.app, ["generate", "x", "--url", "http://127.0.0.1:1", *options])
    assert ended.exit_code == Exit.USAGE
    assert f"Invalid value for --set: {told}" in " ".join(ended.stderr.split())


def test_options_of_a_strategy_are_numbers_truths_and_words() -> None:
    given = ["steps=4", "threshold=1", "filler_rules=false", "fallback=leftmost", "confidence=filtered"]
    wanted = {"steps": 4, "threshold": 1, "filler_rules": False, "fallback": "leftmost", "confidence": "filtered"}
    for strategy in ("low_confidence_dynamic", None, "one of tomorrow"):
        assert options_from(given, strategy) == wanted
    for kind in KINDS.values():
        names = kind.model_fields.keys() - {"strategy"}
        defaults = {name: getattr(kind(), name) for name in names}
        texts = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in defaults.items()]
        assert options_from(texts, kind.model_fields["strategy"].default) == defaults


@pytest.mark.parametrize(("finish", "told"), [("max_tokens", True), ("max_model_len", True), ("stop_token", False)])
async def test_an_answer_that_was_cut_is_told(finish: str, told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    async def states() -> AsyncIterator[Canvas]:
        yield Canvas(blocks=("One day",), finish=finish)

    await show_answer(states(), watch=False)
    shown = capsys.readouterr()
    assert shown.out == "One day\n" and ("diffleet: cut: " in shown.err) == told


def test_a_table_of_findings_on_a_pipe_is_not_folded(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings([Finding("redis", Verdict.NOTE, "word " * 25, "remedy " * 20)])
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """Return why `up` refuses the arguments, having started nothing."""
    monkeypatch.setattr("shared.cli.up.serve", lambda *_: pytest.fail("it was started"))
    ended = CliRunner().invoke(commands.app, ["up", *arguments])
    assert ended.exit_code == Exit.USAGE, ended.output
    return ended.stderr


@pytest.mark.parametrize("url", ["foo", "http://localhost", "localhost:6379", "redis://localhost:port", ""])
def test_up_refuses_what_is_no_redis_url_without_repeating_a_password(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    assert "--redis-url" in refused(monkeypatch, "--redis-url", url)
    assert "secret" not in refused(monkeypatch, "--redis-url", "foo://user:secret@localhost")


@pytest.mark.parametrize("name", ["a b", "", "-x", "a" * 97, "näme"])
def test_up_refuses_a_model_name_that_requests_could_not_ask_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert "--model-name" in refused(monkeypatch, f"--model-name={name}")


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff"])
def test_up_refuses_a_folder_whose_config_is_broken(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: bytes
) -> None:
    (folder / "config.json").write_bytes(config)
    assert "config.json" in refused(monkeypatch, "--model", str(folder))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_up_refuses_a_folder_that_lacks_a_file(monkeypatch: pytest.MonkeyPatch, folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    assert missing.removeprefix("model") in refused(monkeypatch, "--model", str(folder))


def test_up_ends_in_one_line_if_no_redis_answers(tmp_path: Path) -> None:
    ended = diffleet("up", "--redis-url", NOBODY, "--port", "0", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == Exit.NOT_STARTED
    assert len(ended.stderr.splitlines()) == 1 and "no Redis answers" in ended.stderr
    assert not (tmp_path / "data").exists()


def test_up_refuses_a_model_store_that_is_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "--model-store" in refused(monkeypatch, "--model-store", str(tmp_path / "nowhere"))
