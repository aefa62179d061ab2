"""One answer with tool calls, in OpenAI's shape."""

from api.structure.calls import Call, CallReader, Piece
from shared.events import Finished


class CallTeller:
    """Turns the text of one request into contents and calls, whole or as deltas."""

    def __init__(self, request_id: str) -> None:
        self._reader = CallReader()
        self._stem = f"call_{request_id.rpartition('_')[2]}"

    def message(self, text: str) -> dict[str, object]:
        """Return what a whole text puts into its message."""
        self._reader.push(text)
        self._reader.end()
        calls = [self._told(call) for call in self._reader.calls]
        content: dict[str, object] = {"content": self._reader.text or None}
        return content | {"tool_calls": calls} if calls else content

    def push(self, text: str) -> dict[str, object]:
        """Return the delta of a piece of text; empty if nothing became certain."""
        return self._delta(self._reader.push(text))

    def end(self) -> dict[str, object]:
        return self._delta(self._reader.end())

    def finish(self, end: Finished) -> dict[str, object]:
        """Return what the calls change of the finish fields: nothing where there are none."""
        if self._reader.cut:
            return {"finish_reason": "length"}
        return {"finish_reason": "tool_calls"} if self._reader.calls and end.reason == "stop" else {}

    def _delta(self, piece: Piece) -> dict[str, object]:
        delta: dict[str, object] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [{"index": call.index} | self._told(call) for call in piece.calls]
        return delta

    def _told(self, call: Call) -> dict[str, object]:
        if not call.name:
            return {"function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"{self._stem}{call.index}", "type": "function", "function": function}
