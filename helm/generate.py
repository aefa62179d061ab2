"""Write the chart's values.schema.json and README.md: `python -m helm.generate`; with --check only compare."""

import json
import sys
from pathlib import Path

from helm.readme import readme
from helm.schema import values_schema

CHART = Path(__file__).parent / "diffleet"


def outputs() -> dict[Path, str]:
    """Return what each generated file should hold."""
    return {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=1) + "\n",
        CHART / "README.md": readme(CHART),
    }


def main() -> int:
    stale = {path: text for path, text in outputs().items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        if "--check" in sys.argv:
            print(f"{path.name} is stale: run python -m helm.generate")
        else:
            path.write_text(text)
            print(f"wrote {path.name}")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
