"""Follow the canvas while it is denoised, with nothing but httpx."""

import json
import sys

import httpx

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"

body = {"prompt": "Once upon a time", "max_tokens": 24, "stream": True, "stream_mode": "denoise"}
with httpx.stream("POST", f"{URL}/generate", json=body, timeout=60) as response:
    response.raise_for_status()
    for line in response.iter_lines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        match event["event"]:
            case "buffer_snapshot":
                print(f"block {event['block']} step {event['step']}: {event['text']!r}")
            case "append":
                print(f"committed: {event['text']!r}")
            case "final":
                print(f"{event['finish_detail']}: {event['usage']['tokens_per_forward']} tokens per forward")
            case "error":
                sys.exit(event["message"])
