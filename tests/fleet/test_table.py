"""The failure table of this folder's README names tests that exist and run."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS: dict[int, str] = {
    int(number): text
    for number, text in re.findall(
        r"^\| (\d+) \| [^|]+ \| (.+) \|$", (TESTS / "fleet" / "README.md").read_text(), flags=re.MULTILINE
    )
}
CANNOT_OCCUR = {
    42: "every time in `shared/scripts` comes from TIME",
    49: "a submit of a known id changes nothing (row 5)",
}
"""Rows with a reason instead of a test, or with one behind a row number; in words of the reason."""
PASSES_OVER = {"skip", "skipif", "xfail"}


def marks(node: ast.AST) -> set[str]:
    """Return the names of pytest's marks in a decorator or an assignment to `pytestmark`."""
    return {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def marked(path: Path) -> dict[str, set[str]]:
    """Return the tests of a file, with the marks of each and of the file."""
    tree = ast.parse(path.read_text())
    of_all: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
        ):
            of_all |= marks(node.value)
    return {
        node.name: of_all.union(*map(marks, node.decorator_list))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def cited(row: str) -> list[tuple[Path, str]]:
    """Return the files that a row names, each with a sentence; what follows behind a semicolon is of the same file."""
    found: list[tuple[Path, str]] = []
    for begin in re.finditer(r"\b(\w+/test_\w+)(: )?", row):
        rest = re.split(r"\b\w+/test_\w+|; chaos|\)|\. |`", row[begin.end() :])[0] if begin[2] else ""
        sentences = [sentence.partition(" (")[0].strip() for sentence in rest.split(";")]
        found += [(TESTS / f"{begin[1]}.py", sentence) for sentence in sentences if sentence or not begin[2]]
    return found


def as_name(sentence: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", sentence.lower()).strip("_")


def test_every_failure_mode_has_its_row() -> None:
    assert list(ROWS) == list(range(1, 74))


@pytest.mark.parametrize("number", sorted(ROWS))
def test_a_row_of_the_failure_table_names_tests_that_exist_and_are_not_skipped(number: int) -> None:
    row = ROWS[number]
    if like := re.match(r"As (\d+)\b", row):
        row = ROWS[int(like[1])]
    pairs = cited(row)
    assert pairs or CANNOT_OCCUR[number] in row, "neither a test nor a known reason"
    for path, sentence in pairs:
        tests = marked(path)
        meant = [name for name in tests if sentence and as_name(sentence) in name]
        assert meant, f"no test of {path.name} is called {sentence!r}"
        assert not PASSES_OVER & tests[meant[0]], f"{meant[0]} does not run everywhere"


@pytest.mark.parametrize(
    ("row", "sentences"),
    [
        ("fleet/test_a: one thing; another (asked twice); api/test_b: a third; chaos (with more)", 3),
        ("Cannot occur in `take`; after it, shared/test_c: a thing (its rule `x`)", 1),
        ("fleet/test_a; chaos", 1),
        ("No clock is compared", 0),
    ],
)
def test_a_row_is_read_as_it_is_meant(row: str, sentences: int) -> None:
    assert len(cited(row)) == sentences
