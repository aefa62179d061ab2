"""The output of a response: messages and calls of functions, told apart as the text of its request comes in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, assert_never

from api.logprobs import LogprobWriter
from api.schemas import CalledFunction, CalledTool
from api.structure.calls import Call, CallReader
from shared.events import Delta, Failed, Finished
from shared.text import Tokenizer

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Logprobs = Sequence[Mapping[str, object]]


@dataclass(slots=True)
class Said:
    """A message."""

    id: str
    text: str = ""
    logprobs: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])

    def item(self, status: ItemStatus, begun: bool = True) -> dict[str, Any]:
        """Return it in OpenAI's shape; not `begun`: it has no part yet."""
        content = [self.part()] if begun else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs[:]}


@dataclass(slots=True)
class Called:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str = ""

    def item(self, status: ItemStatus, begun: bool = True) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments if begun else "",
        }


@dataclass(frozen=True, slots=True)
class Change:
    """What came to the last item: `text` of a message, or of a call's arguments."""

    item: Said | Called
    index: int
    text: str
    logprobs: Logprobs = ()


class Output:
    """The items so far: a function of the deltas alone, in whatever pieces these are looked at."""

    def __init__(self, stem: str, calls: bool, tokenizer: Tokenizer | None) -> None:
        """`stem` makes the ids; `calls`: the text may hold calls; `tokenizer`: log-probabilities are told."""
        self.items: list[Said | Called] = []
        self._places: list[int] = []
        """Of the calls among the items."""
        self._stem = stem
        self._reader = CallReader() if calls else None
        self._logprobs = None if tokenizer is None else LogprobWriter(tokenizer)

    def push(self, delta: Delta) -> Iterator[Change]:
        if self._reader is None:
            yield self._say(delta.text, self._logprobs_of(delta))
            return
        piece = self._reader.push(delta.text)
        logprobs = self._logprobs_of(replace(delta, text=piece.text))
        yield from (self._call(call) for call in piece.calls if not call.name)
        if piece.text or logprobs:
            yield self._say(piece.text, logprobs)
        yield from (self._call(call) for call in piece.calls if call.name)

    def end(self, end: Finished) -> Iterator[Change]:
        """Take the end in: what was held back, and a message where nothing at all was said."""
        rest = "" if self._reader is None else self._reader.end().text
        told: Logprobs = ()
        if self._logprobs is not None and not self._places:
            told = self._logprobs.response(self._logprobs.of_end(end))
        if rest or told or not self.items:
            yield self._say(rest, told)

    @property
    def cut(self) -> bool:
        """The text has ended within a call."""
        return self._reader is not None and self._reader.cut

    def status(self, end: Finished | Failed) -> Status:
        match end:
            case Failed():
                return "failed"
            case Finished(reason="stop"):
                return "incomplete" if self.cut else "completed"
            case Finished(reason="length"):
                return "incomplete"
            case Finished(reason="aborted"):
                return "cancelled"
            case _:
                raise AssertionError("every reason has a status")

    def told(self, status: Status) -> list[dict[str, Any]]:
        """Return all items in OpenAI's shape, of a response of that status."""
        return [item.item(self.item_status(index, status)) for index, item in enumerate(self.items)]

    def item_status(self, index: int, status: Status) -> ItemStatus:
        """Return the status of an item: only the last one may not be whole."""
        if index < len(self.items) - 1:
            return "completed"
        match status:
            case "queued" | "in_progress":
                return "in_progress"
            case "completed":
                return "completed"
            case "incomplete" | "failed" | "cancelled":
                whole = isinstance(self.items[index], Called) and self._reader is not None and self._reader.whole
                return "completed" if whole else "incomplete"
            case _:
                assert_never(status)

    def message(self) -> dict[str, Any]:
        """Return what was said and called as one message for a template."""
        text = "".join(item.text for item in self.items if isinstance(item, Said))
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [item for item in self.items if isinstance(item, Called)]
        if calls:
            message["tool_calls"] = [
                CalledTool(
                    id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments)
                ).for_template()
                for call in calls
            ]
        return message

    def _say(self, text: str, logprobs: Logprobs) -> Change:
        last = self.items[-1] if self.items else None
        if not isinstance(last, Said):
            earlier = sum(isinstance(item, Said) for item in self.items)
            last = Said(f"msg_{self._stem}" + (f"_{earlier}" if earlier else ""))
            self.items.append(last)
        last.text += text
        last.logprobs += logprobs
        return Change(last, len(self.items) - 1, text, logprobs)

    def _call(self, call: Call) -> Change:
        if call.name:
            item = Called(f"fc_{self._stem}{call.index}", f"call_{self._stem}{call.index}", call.name)
            self._places.append(len(self.items))
            self.items.append(item)
        place = self._places[call.index]
        item = self.items[place]
        assert isinstance(item, Called), "a call stays one"
        item.arguments += call.arguments
        return Change(item, place, call.arguments)

    def _logprobs_of(self, delta: Delta) -> Logprobs:
        return () if self._logprobs is None else self._logprobs.response(self._logprobs.of_delta(delta))
