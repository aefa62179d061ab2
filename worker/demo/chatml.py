"""The chat format: ChatML, written once for training and once as the template that the server renders."""

import json
from collections.abc import Sequence

from worker.demo.items import Turn
from worker.demo.tasks.structure import TOOL_INTRO, TOOL_OUTRO

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END, MASK)
FILLER_ID, TURN_START_ID, STOP_ID, MASK_ID = range(4)

ANSWER_START = f"{TURN_START}assistant\n"


def render_turns(turns: Sequence[Turn]) -> str:
    """Write turns the way the chat template does, without the opening of the answer."""
    return "".join(_turn(role, text) for role, text in turns)


def _turn(role: str, text: str) -> str:
    if role == "tool":
        role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
    return f"{TURN_START}{role}\n{text}{TURN_END}\n"


# Tools join the system turn; their results come back in a user turn. ``tojson`` is the renderer's plain json.dumps.
CHAT_TEMPLATE = (
    "{%- set intro = " + json.dumps(TOOL_INTRO) + " -%}"
    "{%- set outro = " + json.dumps(TOOL_OUTRO) + " -%}"
    "{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\n' -}}"
    "{%- if first -%}{{- first + '\n\n' -}}{%- endif -%}"
    "{{- intro -}}"
    "{%- for tool in tools -%}{{- tool | tojson -}}{%- if not loop.last -%}{{- '\n' -}}{%- endif -%}{%- endfor -%}"
    "{{- outro + '<|im_end|>\n' -}}"
    "{%- elif messages[0].role == 'system' -%}"
    "{{- '<|im_start|>system\n' + first + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' and loop.first -%}"
    "{%- elif message.role == 'tool' -%}"
    "{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}"
    "{%- elif message.role == 'assistant' and message.tool_calls -%}"
    "{{- '<|im_start|>assistant\n' -}}"
    "{%- if message.content -%}{{- message.content + '\n' -}}{%- endif -%}"
    "{%- for call in message.tool_calls -%}"
    "{%- set function = call.function if call.function else call -%}"
    "{{- '<tool_call>\n{\"name\": ' + (function.name | tojson) + ', \"arguments\": ' -}}"
    "{{- function.arguments if function.arguments is string else (function.arguments | tojson) -}}"
    "{{- '}\n</tool_call>' -}}"
    "{%- if not loop.last -%}{{- '\n' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
