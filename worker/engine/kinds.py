"""Which kind of sequence a strategy needs, and what a model must be for it."""

from shared.commands import Generate
from shared.decoding import Decoding, LinearSpeculation, MultiBlock, Renoise, StreamingWindow
from worker.engine.pipeline import Pipelined, works_ahead
from worker.engine.sequence import Sequence
from worker.engine.speculation import Speculative, checks_causally
from worker.engine.streaming import Streaming, streams
from worker.models.spec import ModelSpec


def decodes_by(spec: ModelSpec, decoding: Decoding) -> bool:
    """Tell whether the model can be decoded so."""
    match decoding:
        case MultiBlock():
            return works_ahead(spec)
        case StreamingWindow():
            return streams(spec)
        case LinearSpeculation():
            return checks_causally(spec)
        case _:
            return isinstance(decoding, Renoise) == isinstance(spec.decoding, Renoise)


def kind_of(spec: ModelSpec, request: Generate) -> type[Sequence]:
    """Return the kind of sequence; the plain one also for what the model cannot do, and for a template: one block."""
    decoding = request.decoding or spec.decoding
    if not decodes_by(spec, decoding) or request.template is not None:
        return Sequence
    match decoding:
        case MultiBlock():
            return Pipelined
        case StreamingWindow():
            return Streaming
        case LinearSpeculation():
            return Speculative
        case _:
            return Sequence
