"""Packed rows show the network exactly what the decoder will show it."""

from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from worker.demo.chatml import FILLER_ID, MASK_ID, STOP_ID
from worker.demo.mix import Mix
from worker.demo.model import SHAPES, DemoModel, dense_attend, visible
from worker.demo.rows import BLOCKS, DOCUMENTS, IDS, LABELS, POSITIONS, SEGMENTS, document, encode, pack
from worker.demo.train import MODELS

TOKENIZER = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))


def test_a_noisy_block_is_computed_as_the_decoder_computes_it() -> None:
    rng, noise, mix = Random(3), np.random.default_rng(3), Mix()
    block = 16
    encoded = [encode(mix.conversation(rng), TOKENIZER) for _ in range(6)]
    packed = pack((document(tokens, block, noise) for tokens in encoded * 50), 1, 1024)
    model = DemoModel(SHAPES["nano"])
    ids, positions = (torch.from_numpy(packed[axis].astype(np.int64)) for axis in (IDS, POSITIONS))
    kinds = [torch.from_numpy(packed[axis].astype(np.int64)) for axis in (DOCUMENTS, BLOCKS, SEGMENTS)]
    hidden = model(ids, positions, dense_attend(visible(*kinds)))[0]
    checked = 0
    for index in range(int(packed[DOCUMENTS].max())):
        tokens = encoded[index % 6].ids
        for segment in range(1, len(encoded[index % 6].answers) + 1):
            here = (packed[DOCUMENTS, 0] == index) & (packed[SEGMENTS, 0] == segment)
            for number in np.unique(packed[BLOCKS, 0, here]):
                where = np.flatnonzero(here & (packed[BLOCKS, 0] == number))
                canvas = torch.tensor([tokens[: number * block] + packed[IDS, 0, where].tolist()])
                blocks = torch.arange(canvas.shape[1]) // block
                alone = model(canvas, torch.arange(canvas.shape[1])[None], dense_attend(blocks[:, None] >= blocks))
                torch.testing.assert_close(hidden[where], alone[0, -block:], atol=2e-5, rtol=1e-4)
                checked += 1
    assert checked > 10


def test_hidden_tokens_are_labelled_with_the_truth_and_prompts_stay_visible() -> None:
    rng, noise, mix = Random(5), np.random.default_rng(5), Mix()
    for block in (8, 16, 32):
        for _ in range(60):
            tokens = encode(mix.conversation(rng), TOKENIZER)
            columns = document(tokens, block, noise)
            for segment, (start, end) in enumerate(tokens.answers, 1):
                part = columns[:, columns[SEGMENTS] == segment]
                positions, hidden = part[POSITIONS], part[LABELS] >= 0
                truth = [tokens.ids[p] if p < end else FILLER_ID for p in positions]
                assert hidden.any()
                assert not hidden[positions < start].any()
                assert np.where(hidden, part[LABELS], part[IDS]).tolist() == truth
                assert (part[IDS][hidden] == MASK_ID).all()
                assert len(positions) % block == 0
                assert positions[0] % block == 0
                assert tokens.ids[end - 1] == STOP_ID


def test_packing_keeps_documents_whole_and_marks_the_rest() -> None:
    rng, noise, mix = Random(8), np.random.default_rng(8), Mix()
    made = (document(encode(mix.conversation(rng), TOKENIZER), 16, noise) for _ in range(400))
    packed = pack(made, 4, 512)
    assert packed.shape == (6, 4, 512)
    used = packed[DOCUMENTS] >= 0
    assert used.mean() > 0.75
    assert (packed[LABELS][~used] == -1).all()
    for row in range(4):
        order = packed[DOCUMENTS, row][used[row]]
        assert (np.diff(order) >= 0).all()
        assert (np.diff(order) <= 1).all()
