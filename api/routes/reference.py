"""The reference at /docs: drawn from /openapi.json by a page of this package, so that it works without the internet."""

from api.pages import page_router

NAMES = ("reference.css", "main.js", "schema.js", "attempt.js")

router = page_router("reference", NAMES, "/docs", "/docs")
