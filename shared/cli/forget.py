"""`diffleet forget`: models that nobody serves any more."""

from collections.abc import Sequence

from shared.cli.exits import Exit, Stop
from shared.cli.operations import operating
from shared.client import UnknownModel
from shared.departure import Forgotten, StillServed, forget


async def forget_all(redis_url: str, models: Sequence[str]) -> None:
    """Forget each and print what went with it, also behind one that is refused; raises `Stop`."""
    refused: list[str] = []
    async with operating(redis_url) as (fleet, link):
        for model in dict.fromkeys(models):
            try:
                print(f"{model}  {_told(await forget(fleet, link, model))}")
            except (StillServed, UnknownModel) as error:
                refused.append(str(error))
    if refused:
        raise Stop(Exit.REFUSED, "; ".join(refused))


def _told(gone: Forgotten) -> str:
    what = ["its card"]
    if gone.adapters:
        what.append(f"its adapters {', '.join(gone.adapters)}, whose files stay")
    if gone.dead_letters:
        what.append(f"{gone.dead_letters} dead letter{'' if gone.dead_letters == 1 else 's'}")
    return f"forgotten: {'; '.join(what)}"
