"""Draw docs/images/autoscaling.svg from a simulated day of bursts: `python -m tests.helm.plot`."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shared.client import FleetClient
from shared.connection import open_sync_client
from shared.embedded import EmbeddedServer
from tests.helm.simulation import Sample, Simulation
from tests.helm.test_autoscaling import MODEL, START_S, scaled_object

OUT = Path(__file__).parents[2] / "docs" / "images" / "autoscaling.svg"
_WIDTH, _HEIGHT, _LEFT, _GAP = 760, 130, 60, 34


async def record() -> list[Sample]:
    """Return two bursts and a long job, from rest to rest."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder))
        server.start()
        redis = open_sync_client(server.url)
        try:
            async with FleetClient.connect(server.url) as fleet:
                simulation = Simulation(server.url, redis, fleet, scaled_object(), MODEL, start_s=START_S)
                await simulation.serve_once()
                await simulation.run(120)
                await simulation.submit(90, takes_s=60)
                await simulation.run(1200)
                await simulation.submit(40, takes_s=60)
                await simulation.submit(1, takes_s=1800, lane="bulk")
                await simulation.run(4200)
                await simulation.close()
                return simulation.samples
        finally:
            redis.close()
            server.stop()


def draw(samples: Sequence[Sample]) -> str:
    """Return an SVG of three panels over one time axis."""
    panels: list[tuple[str, list[tuple[str, str, Callable[[Sample], float]]]]] = [
        ("workers", [("wanted", "#1f77b4", lambda s: s.replicas), ("ready", "#2ca02c", lambda s: s.ready)]),
        ("requests", [("queued", "#d62728", lambda s: s.queued), ("running", "#7f7f7f", lambda s: s.running)]),
        ("oldest unclaimed, s", [("age", "#9467bd", lambda s: s.oldest_s)]),
    ]
    end = samples[-1].now
    height = len(panels) * (_HEIGHT + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 20} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, (title, lines) in enumerate(panels):
        top = 24 + number * (_HEIGHT + _GAP)
        most = max(1.0, *(read(sample) for _, _, read in lines for sample in samples))
        parts.append(f'<text x="{_LEFT}" y="{top - 6}" font-weight="bold">{title}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#ccc"/>')
        for share in (0.0, 0.5, 1.0):
            y = top + _HEIGHT * (1 - share)
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{most * share:g}</text>')
        for place, (name, color, read) in enumerate(lines):
            points = " ".join(
                f"{_LEFT + _WIDTH * now / end:.1f},{top + _HEIGHT * (1 - value / most):.1f}"
                for now, value in _corners([(sample.now, read(sample)) for sample in samples])
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
            x = _LEFT + _WIDTH - 150 + 80 * place
            parts.append(f'<text x="{x}" y="{top - 6}" fill="{color}">{name}</text>')
    bottom = height - 24
    for minute in range(0, int(end / 60) + 1, 10):
        x = _LEFT + _WIDTH * minute * 60 / end
        parts.append(f'<text x="{x:.0f}" y="{bottom}" text-anchor="middle">{minute} min</text>')
    return "\n".join([*parts, "</svg>", ""])


def _corners(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out what lies on a straight line between its neighbours."""
    kept = [points[0]]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        if (here[1] - before[1]) * (after[0] - here[0]) != (after[1] - here[1]) * (here[0] - before[0]):
            kept.append(here)
    return [*kept, points[-1]]


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(draw(asyncio.run(record())))
    print(f"wrote {OUT}", file=sys.stderr)
