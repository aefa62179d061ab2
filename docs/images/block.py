"""Draw docs/images/block.svg: one block of a real answer, row by row as it is denoised.

    python docs/images/block.py http://127.0.0.1:8000 docs/images/block.svg

Needs a running fleet; asks for one block of the bundled model's length with temperature 0.
"""

import html
import json
import sys
import urllib.request
from http.client import HTTPResponse

PROMPT = "Tell me a story about a fox."
CELL, ROW, LEFT = 62, 30, 92
HEAT = ((0.97, "#ffd978"), (0.9, "#fbeaa0"), (0.7, "#e2f3bf"), (0.5, "#cfeee2"), (0.3, "#c6e0f5"), (0.0, "#bfd0ff"))


def snapshots(url: str) -> tuple[list[dict], str]:
    """Return the snapshots of the first block, and its text once committed."""
    with post(url, "/tokenize", {"messages": [{"role": "user", "content": PROMPT}]}) as answer:
        prompt = json.load(answer)["tokens"]
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True, "stream_mode": "denoise"}
    seen, text = [], ""
    with post(url, "/generate", body | {"diffusion": {"frame_interval_ms": 0}}) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["event"] == "buffer_snapshot" and event["block"] == 0:
                    seen.append(event)
                elif event["event"] == "append" and not text:
                    text = event["text"]
    return seen, text


def post(url: str, path: str, body: dict) -> HTTPResponse:
    head = {"Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), head), timeout=60)


def draw(seen: list[dict], text: str) -> str:
    """Return the picture: one row a step, a grey cell for each mask, colour by confidence."""
    width = LEFT + CELL * max((len(event["tokens"]) for event in seen), default=1) + 12
    height = ROW * (len(seen) + 2) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        'font-size="13" role="img" aria-label="A block being denoised, one row for each step">',
        f'<rect width="{width}" height="{height}" fill="#fdfcf9"/>',
    ]
    for row, event in enumerate(seen):
        y = 8 + row * ROW
        parts.append(f'<text x="10" y="{y + 18}" fill="#5a626d">step {event["step"]}</text>')
        for column, (token, sure) in enumerate(zip(event["tokens"], event["confidence"], strict=True)):
            x = LEFT + column * CELL
            colour = "#dfe3e8" if token is None else next(colour for least, colour in HEAT if sure >= least)
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL - 4}" height="{ROW - 6}" rx="4" fill="{colour}"/>')
            if token is not None:
                shown = written(token.replace("\n", "⏎").strip()) or "·"
                middle = x + (CELL - 4) / 2
                parts.append(f'<text x="{middle}" y="{y + 17}" text-anchor="middle" fill="#1c2026">{shown}</text>')
    y = 8 + len(seen) * ROW
    parts.append(f'<text x="10" y="{y + 18}" fill="#5a626d">committed</text>')
    parts.append(f'<text x="{LEFT}" y="{y + 18}" fill="#1c2026">{written(text.strip())}</text>')
    y += ROW
    parts.append(f'<text x="{LEFT}" y="{y + 18}" fill="#5a626d">grey: masked; blue to yellow: confidence 0 to 1</text>')
    return "\n".join([*parts, "</svg>", ""])


def written(text: str) -> str:
    """Return the text for XML, which has no control characters."""
    return html.escape("".join(char for char in text if char.isprintable()))


if __name__ == "__main__":
    address, path = sys.argv[1:]
    for _ in range(10):
        seen, text = snapshots(address)
        # Snapshots are the first to be dropped where a machine is busy: ask again.
        if seen:
            break
    with open(path, "w", encoding="utf-8") as file:
        file.write(draw(seen, text))
