"""Structured output over HTTP: what a body asks for as a constraint, and tool calls as OpenAI tells them."""
