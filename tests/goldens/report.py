"""What the golden runs showed, as tables: by family and way of running, and by setting."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# Which test shows what; a test that is not named here proves a rule and no equality.
WAYS = {
    "test_a_prefill_gives_the_references_logits": "logits",
    "test_a_canvas_behind_its_prompt_gives_the_references_logits": "logits",
    "test_a_request_alone_gives_the_references_tokens_and_forwards": "alone",
    "test_a_request_alone_gives_the_references_tokens_and_canvases": "alone",
    "test_a_batch_of_runs_gives_the_tokens_of_each_alone[together]": "batched",
    "test_a_batch_of_runs_gives_the_tokens_of_each_alone[one-a-step]": "arriving late",
    "test_a_batch_of_runs_gives_the_tokens_of_each_alone[narrow]": "in chunks",
    "test_a_text_that_is_written_already_gives_the_same_tokens": "cached prefix",
    "test_pages_for_little_more_than_the_longest_run_change_no_token": "preempted",
    "test_runs_that_are_handed_over_go_on_to_the_same_tokens": "resumed",
}
Properties = Mapping[str, str | int | float]


@dataclass(slots=True)
class Tally:
    """Runs of one family in one way."""

    runs: int = 0
    equal: int = 0

    def __str__(self) -> str:
        return f"{self.equal}/{self.runs}" if self.runs else "-"


@dataclass(slots=True)
class Setting:
    """One recorded run of a reference, or one forward."""

    tokens: int = 0
    forwards: int = 0
    theirs: int = 0
    """Forwards of the reference's own count."""
    tokens_equal: bool = True
    forwards_equal: bool = True


@dataclass(slots=True)
class Outcome:
    """Gathers the properties that the tests recorded, whatever process ran them."""

    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict[tuple[str, str], Tally])
    errors: dict[str, float] = field(default_factory=dict[str, float])
    reference_errors: dict[str, float] = field(default_factory=dict[str, float])
    """Of the reference's float32 against float64."""
    preemptions: dict[str, int] = field(default_factory=dict[str, int])
    settings: dict[tuple[str, str], Setting] = field(default_factory=dict[tuple[str, str], Setting])

    def add(self, properties: Properties, passed: bool) -> None:
        """Take in one test's result; one without a family is none of ours."""
        if "family" not in properties:
            return
        family, way, runs = str(properties["family"]), str(properties["way"]), int(properties["runs"])
        tally = self.tallies.setdefault((family, way), Tally())
        tally.runs += runs
        tally.equal += runs * passed
        for kind, errors in (("error", self.errors), ("reference_error", self.reference_errors)):
            if kind in properties:
                errors[family] = max(errors.get(family, 0.0), float(properties[kind]))
        if "preemptions" in properties:
            self.preemptions[family] = self.preemptions.get(family, 0) + int(properties["preemptions"])
        if way == "alone":
            found = self.settings.setdefault((family, str(properties["setting"])), Setting())
            found.tokens += int(properties.get("tokens", 0))
            found.forwards += int(properties.get("forwards", 0))
            found.theirs += int(properties.get("reference_forwards", 0))
            found.tokens_equal &= bool(properties.get("tokens_equal", False))
            found.forwards_equal &= bool(properties.get("forwards_equal", False))

    def by_family(self) -> list[list[str]]:
        """Return the rows of the table by family, its head first."""
        families = sorted({family for family, _ in self.tallies})
        ways = [way for way in dict.fromkeys(WAYS.values()) if any(name == way for _, name in self.tallies)]
        rows = [["family", "logits error", "the reference's own", *ways, "preemptions"]]
        for family in families:
            known = [f"{of[family]:.1e}" if family in of else "-" for of in (self.errors, self.reference_errors)]
            counts = [str(self.tallies.get((family, way), Tally())) for way in ways]
            rows.append([family, *known, *counts, str(self.preemptions.get(family, 0))])
        return rows

    def by_setting(self) -> list[list[str]]:
        rows = [["family", "setting", "tokens", "equal", "forwards", "equal", "the reference counts"]]
        for (family, name), found in sorted(self.settings.items()):
            marks = ["yes" if equal else "NO" for equal in (found.tokens_equal, found.forwards_equal)]
            counts = [str(found.tokens), marks[0], str(found.forwards), marks[1], str(found.theirs)]
            rows.append([family, name, *counts])
        return rows


def markdown(rows: Iterable[Iterable[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *body]) + "\n"


def columns(rows: list[list[str]]) -> list[str]:
    """Return the rows as lines of even columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
