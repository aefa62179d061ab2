"""Tables that `diffleet` prints."""

from rich.console import Console
from rich.table import Table

from shared.block_lengths import InvalidBlockLengths, read_block_lengths
from shared.cli.bundled import bundled_models
from shared.cli.evaluation import Evaluation, block_length_table, evaluation_table, provenance
from shared.cli.exits import Exit, Stop
from shared.cli.http_fleet import fleet_models


async def print_models(url: str) -> None:
    """Print the bundled models with their sizes, then those of the fleet at `url`, if one answers."""
    console = Console(highlight=False)
    table = Table("bundled model", "type", "layers", "hidden", "block", "MB", box=None, pad_edge=False)
    for model in bundled_models().values():
        config = model.config()
        facts = [str(config.get(key, "?")) for key in ("model_type", "num_hidden_layers", "hidden_size", "block_size")]
        table.add_row(model.name, *facts, f"{model.size_mb:.1f}")
    if table.row_count:
        console.print(table)
    else:
        console.print("no bundled models in this installation")
    try:
        names = await fleet_models(url)
    except Stop as problem:
        console.print(f"\n{problem}", soft_wrap=True)
    else:
        console.print(f"\nfleet at {url}: {', '.join(names) or 'no model announced yet'}", soft_wrap=True)


def print_evaluation(name: str) -> None:
    """Print the report of a bundled model; raises `Stop` if there is none."""
    models = bundled_models()
    if name not in models:
        raise Stop(Exit.USAGE, f"{name!r} is not a bundled model; here are: {', '.join(models) or 'none'}")
    report = models[name].evaluation()
    if report is None:
        raise Stop(Exit.FAILED, f"{models[name].folder} has no eval.json")
    evaluation = Evaluation.model_validate(report)
    console = Console(highlight=False)
    console.print(evaluation_table(evaluation))
    console.print(provenance(evaluation), soft_wrap=True)
    try:
        lengths = read_block_lengths(models[name].folder)
    except InvalidBlockLengths as error:
        raise Stop(Exit.FAILED, f"{models[name].folder}: {error}") from error
    if lengths is not None:
        console.print(f"\nby block length, measured {lengths.date} on {lengths.items} of these items, by threshold:")
        console.print(block_length_table(lengths, int(str(models[name].config()["block_size"]))))
