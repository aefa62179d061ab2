"""The playground: one static page at /, and the files that it loads, all from this package."""

from api.pages import PAGE, media_type, page_router

NAMES = (
    "playground.css",
    "icon.svg",
    "main.js",
    "canvas.js",
    "card.js",
    "client.js",
    "knobs.js",
    "models.js",
    "request.js",
)
MEDIA_TYPES = {name: media_type(name) for name in (PAGE, *NAMES)}

router = page_router("playground", NAMES, "/", "/playground")
