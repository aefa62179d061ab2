"""What ships beside a bundled model of how good it is (`eval.json`, `block_lengths.json`), laid out as tables."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from shared.block_lengths import BlockLengths, eligible


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Score(_Part):
    """`tokens_per_forward` counts tokens of the answer only; `unclosed` the answers that did not end by themselves."""

    accuracy: float
    tokens_per_forward: float
    unclosed: int


class Entry(_Part):
    """One task, group or all of them: accepted by confidence threshold, and one token at a time."""

    items: int
    threshold: Score
    sequential: Score


class Training(_Part):
    device: str
    seconds: float


class Evaluation(_Part):
    model: str
    date: str
    device: str
    training: Training | None = None
    tasks: dict[str, Entry]
    groups: dict[str, Entry]
    overall: Entry


def evaluation_table(evaluation: Evaluation) -> Table:
    """Return one row for each task, then for each group, then for all."""
    table = Table(box=None, pad_edge=False)
    table.add_column("\ntask", no_wrap=True)
    table.add_column("\nitems", justify="right")
    for mode in ("by threshold", "one a step"):
        table.add_column(f"{mode}\nright", justify="right")
        table.add_column("tokens/\nforward", justify="right")
    for section, rows in (("tasks", evaluation.tasks), ("groups", evaluation.groups)):
        for name, entry in rows.items():
            table.add_row(name if section == "tasks" else f"all {name}", *_cells(entry))
        table.add_section()
    table.add_row("everything", *_cells(evaluation.overall))
    return table


def block_length_table(measured: BlockLengths, own: int) -> Table:
    """Return one row for each block length; `own` is the model's."""
    table = Table(box=None, pad_edge=False)
    for header in ("blocks of", "right", "tokens/forward"):
        table.add_column(header, justify="right")
    table.add_column("may be chosen by load")
    allowed = eligible(measured, own, measured.decoding)
    for row in measured.lengths:
        right, tokens = f"{100 * row.accuracy:.1f} %", f"{row.tokens_per_forward:.2f}"
        table.add_row(str(row.block_length), right, tokens, "yes" if row.block_length in allowed else "no")
    return table


def provenance(evaluation: Evaluation) -> str:
    """Return when and on what the figures were measured, and what the model was trained on."""
    text = f"{evaluation.model}: measured {evaluation.date} on {evaluation.device}, on items that training never saw"
    if evaluation.training is not None:
        text += f"; trained {evaluation.training.seconds:.0f} s on {evaluation.training.device}"
    return text


def _cells(entry: Entry) -> Iterator[str]:
    yield str(entry.items)
    for score in (entry.threshold, entry.sequential):
        yield f"{100 * score.accuracy:.1f} %"
        yield f"{score.tokens_per_forward:.2f}"
