"""Pieces come from the text, for every kind of tokenizer (LMCache#1136, #194, R1#151)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvsem.chunkers.code import CodeChunker
from kvsem.chunkers.dialogue import DialogueChunker
from kvsem.chunkers.markdown import MarkdownChunker
from kvsem.chunkers.segment import SegmentChunker
from kvsem.chunkers.sentence import SentenceChunker
from kvsem.errors import DataError
from kvsem.packaged import packaged_path
from kvsem.prompt import Prompt, chunks_of, render
from kvsem.types import Chunk, Message, Request, Segment, Span
from tests.tiny import TEMPLATE, fast, prose, tiny_tokenizer

ALPHABET = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;#-[]?!|<>_\n")
CJK = "今天气很好我们去公园吧。桥是一八四七年建的，石头做。"
CORPUS = [prose(seed, 100) for seed in range(10)] + ["system user assistant\n\n" + CJK] * 5
SPECIAL = ["[CLS]", "[SEP]", "[UNK]", "<|im_start|>", "<|im_end|>"]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return fast(tokenizer, bos_token="[CLS]", unk_token="[UNK]")


def bos_first(tokenizer: Tokenizer, also_last: bool = False) -> Tokenizer:
    single = "[CLS] $A [SEP]" if also_last else "[CLS] $A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return tokenizer


def bpe(pre_tokenizer: Any, alphabet: list[str] | None = None, size: int = 500) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet or pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return bos_first(tokenizer)


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=[*ALPHABET, *CJK],
        unk_token="[UNK]",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return bos_first(tokenizer)


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=[*ALPHABET, *CJK],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return bos_first(tokenizer, also_last=True)


def merging() -> Tokenizer:
    """Punctuation takes the line breaks behind it into its token, as in many newer models."""
    split = Regex(r"[^\s\w]+[\r\n]*|\d{1,3}| ?\p{L}+|\s*[\r\n]+|\s+")
    return bpe(
        pre.Sequence([pre.Split(split, "isolated"), pre.ByteLevel(False, use_regex=False)]),
    )


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    match name:
        case "byte_bpe":
            return tiny_tokenizer()
        case "unigram":
            return wrapped(unigram())
        case "wordpiece":
            return wrapped(wordpiece())
        case "whitespace_bpe":
            return wrapped(bpe(pre.Whitespace(), [*ALPHABET, *CJK]))
        case _:
            return wrapped(merging())


NAMES = ("byte_bpe", "unigram", "wordpiece", "whitespace_bpe", "merging")
EDGES = {
    "letters": ("bridge of stone was built", "river and market opened"),
    "stops": ("The bridge was built.", "It opened in summer!"),
    "digits": ("1847 was the year 1912", "30 workers moved 7 stones 42"),
    "newlines": ("first line\nsecond line\n\nthird line", "one\n\n\ntwo"),
    "cjk": ("今天天气很好。我们去公园吧。", "桥是一八四七年建的"),
    "marks": ("see #42 --- and [SEP] of the letter", "# # --- [SEP] ### #42"),
    "spaces": ("  led by space and ended \t", " \nline "),
    "one word": ("bridge", "1847"),
}


@pytest.fixture(params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tokenizer_of(str(request.param))


def chunks(prompt: Prompt, chunker: Any = None) -> list[Chunk]:
    cut = chunker or SegmentChunker()
    return [
        chunk
        for piece in prompt.pieces
        if piece.kind not in ("system", "question")
        for chunk in chunks_of(prompt, piece, cut.split(piece.text), "ns")
    ]


def assert_covers(prompt: Prompt) -> None:
    """Pieces are in order, without gap, from the first token on, and hold their own text."""
    edges = [0, *(piece.end for piece in prompt.pieces)]
    assert [piece.start for piece in prompt.pieces] == edges[:-1]
    limits = [piece.chars.end for piece in prompt.pieces]
    if prompt.pieces[0].kind == "system":  # the head reaches up to the first user text
        limits[0] = prompt.pieces[1].chars.start
    for piece, limit in zip(prompt.pieces, limits, strict=True):
        assert prompt.text[piece.chars.start : piece.chars.end] == piece.text
        starts = prompt.offsets[:, 0]
        inside = (starts >= piece.chars.start) & (starts < piece.chars.end)
        inside &= prompt.offsets[:, 1] > starts
        at = np.flatnonzero(inside)
        assert ((at >= piece.start) & (at < piece.end)).all()  # no token of the text is outside
        behind = prompt.offsets[piece.start : piece.end, 0]
        assert (behind < limit).all()  # and none of what follows is inside


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("system", [None, "You answer briefly."])
def test_as_many_pieces_as_segments(
    tokenizer: PreTrainedTokenizerFast, edge: str, system: str | None
) -> None:
    passages = [*EDGES[edge], prose(3, 12), EDGES[edge][0]]
    prompt = render(tokenizer, Request.rag("r", passages, "Why #42?", system=system))
    kinds = [piece.kind for piece in prompt.pieces]
    assert kinds == ["system", *["passage"] * 4, "question"]
    assert [p.text for p in prompt.pieces[1:]] == [
        *(text.strip() for text in passages),
        "Question: Why #42?",
    ]
    assert_covers(prompt)
    found = chunks(prompt)
    assert [chunk.text for chunk in found] == [text.strip() for text in passages]
    assert prompt.n_cacheable == found[-1].end
    for chunk in found:
        assert (chunk.ids == prompt.ids[chunk.start : chunk.end]).all()
        assert 0 <= chunk.inner[0] <= chunk.inner[1] <= len(chunk.ids)


@pytest.mark.parametrize("edge", EDGES)
def test_ids_are_those_of_the_whole_text(tokenizer: PreTrainedTokenizerFast, edge: str) -> None:
    """As a plain engine tokenises it; BOS exactly once, at 0."""
    request = Request.rag("r", [*EDGES[edge]], "Why?", system="Be brief.")
    prompt = render(tokenizer, request)
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    want: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    assert prompt.ids.tolist() == want["input_ids"]
    assert np.flatnonzero(prompt.ids == tokenizer.bos_token_id).tolist() == [0]
    for chunk in chunks(prompt):
        assert tokenizer.bos_token_id not in chunk.ids.tolist()


@pytest.mark.parametrize("edge", EDGES)
def test_a_text_that_brings_its_bos_gets_no_second(
    tokenizer: PreTrainedTokenizerFast, edge: str
) -> None:
    """A prompt that a template rendered elsewhere (vllm PR 16976, DeepSeek-R1#151)."""
    request = Request.rag("r", [*EDGES[edge]], "Why?", system="Be brief.")
    text = render(tokenizer, request).text
    assert text.startswith(str(tokenizer.bos_token))
    messages = [{"role": m.role, "content": m.content} for m in request.messages]
    want: Any = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True
    )
    prompt = render(tokenizer, Request("r", text=text))
    ends = len(want["input_ids"])
    assert prompt.ids[:ends].tolist() == want["input_ids"]  # wordpiece adds a [SEP] behind it
    assert np.flatnonzero(prompt.ids == tokenizer.bos_token_id).tolist() == [0]
    assert prompt.offsets[0].tolist() == [0, len(str(tokenizer.bos_token))]
    assert [(p.start, p.end) for p in prompt.pieces] == [(0, len(prompt.ids))]


@pytest.mark.parametrize("edge", EDGES)
def test_the_key_is_the_same_at_every_place(tokenizer: PreTrainedTokenizerFast, edge: str) -> None:
    """With and without a system prompt ahead, first, in the middle and last."""
    text = EDGES[edge][0]
    keys = set()
    for system in (None, "You answer briefly."):
        for place in range(3):
            passages = [prose(5, 7), prose(6, 7)]
            passages.insert(place, text)
            prompt = render(tokenizer, Request.rag("r", passages, "Why?", system=system))
            keys.add(chunks(prompt)[place].key)
    assert len(keys) == 1


def test_keys_of_different_texts_differ(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [text for pair in EDGES.values() for text in pair]
    prompt = render(tokenizer, Request.rag("r", texts, "Why?"))
    assert len({chunk.key for chunk in chunks(prompt)}) == len(texts)


@pytest.mark.parametrize("edge", EDGES)
def test_no_chat_template(tokenizer: PreTrainedTokenizerFast, edge: str) -> None:
    plain = fast(tokenizer.backend_tokenizer, None, bos_token=str(tokenizer.bos_token))
    request = Request.rag("r", EDGES[edge], "Why?", system="Be brief.")
    prompt = render(plain, request)
    assert prompt.text.endswith("\n\nQuestion: Why?\n\nAnswer:")
    assert [p.kind for p in prompt.pieces] == ["system", "passage", "passage", "question"]
    assert_covers(prompt)
    assert np.flatnonzero(prompt.ids == plain.bos_token_id).tolist() == [0]
    assert prompt.ids.tolist() == plain(prompt.text)["input_ids"]


def test_a_plain_text_is_one_passage(tokenizer: PreTrainedTokenizerFast) -> None:
    text = prose(4) + "\n\n" + CJK
    prompt = render(tokenizer, Request("r", text=text))
    assert [(p.kind, p.start, p.end) for p in prompt.pieces] == [("passage", 0, len(prompt.ids))]
    assert np.flatnonzero(prompt.ids == tokenizer.bos_token_id).tolist() == [0]
    later = render(tokenizer, Request.rag("r", [prose(9), text], "Why?"))
    assert chunks(prompt)[0].key == chunks(later)[1].key


def test_finer_chunks_cover_their_piece(tokenizer: PreTrainedTokenizerFast) -> None:
    """No gap, no overlap, whatever the chunker's spans cut through."""
    passages = [prose(11, 60), CJK * 3, "a. b. c.\n\n- d\n- e"]
    prompt = render(tokenizer, Request.rag("r", passages, "Why?"))
    found = chunks(prompt, SentenceChunker(max_tokens=6))
    assert len(found) > 8
    assert found[0].start == prompt.pieces[0].end
    assert [c.start for c in found[1:]] == [c.end for c in found[:-1]]
    assert found[-1].end == prompt.n_cacheable
    for chunk in found:
        assert chunk.text == chunk.text.strip() != ""


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_spans_inside_tokens(tokenizer: PreTrainedTokenizerFast, width: int) -> None:
    """A chunker that cuts every few characters: chunks still partition the piece's tokens."""
    prompt = render(tokenizer, Request.rag("r", [prose(1, 9)], "Why?"))
    piece = prompt.pieces[1]
    n = len(piece.text)
    spans = [Span(i, min(n, i + width)) for i in range(0, n, width)]
    found = chunks_of(prompt, piece, spans, "ns")
    assert found[0].start == piece.start
    assert found[-1].end == piece.end
    assert [c.start for c in found[1:]] == [c.end for c in found[:-1]]


def test_a_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = ["Who built it?", "The company.", "And when was it?", "In 1847."]
    roles = ["user", "assistant"] * 2
    messages = [Message(r, (Segment("turn", t),)) for r, t in zip(roles, turns, strict=True)]
    messages.append(Message("user", (Segment("question", "Who built it?"),)))
    prompt = render(tokenizer, Request("r", tuple(messages)))
    assert [p.kind for p in prompt.pieces] == ["system", *["turn"] * 4, "question"]
    assert [p.text for p in prompt.pieces[1:]] == [*turns, "Who built it?"]
    assert_covers(prompt)
    assert prompt.pieces[-1].chars.start == prompt.text.rindex("Who built it?")


def test_a_segment_that_the_template_rewrites_is_left_out() -> None:
    """Thoughts of earlier turns vanish from the prompt: that turn has no piece of its own."""
    template = TEMPLATE.replace("m['content']", "m['content'].split('</think>')[-1]")
    tokenizer = fast(tiny_tokenizer().backend_tokenizer, template, bos_token="<|bos|>")
    messages = (
        Message("user", (Segment("turn", "the bridge"),)),
        Message("assistant", (Segment("turn", "<think>hm</think>of stone"),)),
        Message("user", (Segment("question", "Why?"),)),
    )
    prompt = render(tokenizer, Request("r", messages))
    assert [p.text for p in prompt.pieces[1:]] == ["the bridge", "Why?"]
    assert_covers(prompt)


def test_a_template_that_refuses_is_a_data_error() -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
    )
    tokenizer = fast(tiny_tokenizer().backend_tokenizer, template)
    with pytest.raises(DataError, match=r"request 'r': .* System role not supported"):
        render(tokenizer, Request.rag("r", ["the river"], "Why?", system="Be brief."))


def test_a_text_without_tokens_is_a_data_error() -> None:
    bare = Tokenizer(models.WordLevel({"a": 0}))
    bare.normalizer = normalizers.Replace("\u3164", "")
    with pytest.raises(DataError, match=r"request 'r': .*no token"):
        render(fast(bare, None), Request("r", text="\u3164"))


def test_short_turns_are_not_found_in_the_template() -> None:
    """A message that says `user`, or one letter of `<|im_start|>`, stands where it was put."""
    words = ("user", "i", "assistant", "a", "end", "system")
    roles = ("user", "assistant")
    messages = tuple(
        Message(roles[i % 2], (Segment("turn" if i < 4 else "question", word),))
        for i, word in enumerate(words[:5])
    )
    prompt = render(tiny_tokenizer(), Request("chat", messages))
    located = [p for p in prompt.pieces if p.kind != "system"]
    assert [p.text for p in located] == list(words[:5])
    for piece in located:
        before = prompt.text[: piece.chars.start]
        assert before.endswith(("<|im_start|>user\n", "<|im_start|>assistant\n"))


def test_a_content_with_space_around_it_is_found() -> None:
    messages = (
        Message("user", (Segment("turn", "\n  the first turn \n"),)),
        Message("assistant", (Segment("turn", " second\n\n"),)),
        Message("user", (Segment("question", "third"),)),
    )
    prompt = render(tiny_tokenizer(), Request("chat", messages))
    assert [p.text for p in prompt.pieces[1:]] == ["the first turn", "second", "third"]


# Chunkers: no boundary moves with what stands around it (A8) ------------------------------------

CONF = Path(__file__).parents[2] / "conf"
CHUNKERS = sorted(path.stem for path in (CONF / "chunker").glob("*.yaml"))


@cache
def chunker_of(name: str) -> Any:
    """As configured, but for an embedder that takes no model."""
    cfg = OmegaConf.load(CONF / "chunker" / f"{name}.yaml")
    if "embedder" in cfg:
        cfg.embedder = OmegaConf.load(CONF / "embedder" / "hashing.yaml")
    return instantiate(cfg)


def test_there_are_chunkers() -> None:
    assert {"segment", "sentence", "fixed", "markdown", "code", "dialogue", "topic"} <= set(
        CHUNKERS
    )


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", CHUNKERS)
def test_as_many_chunks_as_spans(tokenizer: PreTrainedTokenizerFast, name: str, edge: str) -> None:
    """The boundaries of the chunker, and none else, whatever stands beside them."""
    first, second = EDGES[edge]
    passages = [
        f"{first}\n\n{second}",
        prose(3, 200),
        second + first,
        f"User: {first}\nBot: {second}",
    ]
    prompt = render(tokenizer, Request.rag("r", passages, "Why #42?"))
    for piece in prompt.pieces[1:-1]:
        spans = chunker_of(name).split(piece.text)
        found = chunks_of(prompt, piece, spans, "ns")
        texts = [piece.text[span.start : span.end].strip() for span in spans]
        assert [chunk.text for chunk in found] == [text for text in texts if text]
        assert [piece.start, *(chunk.end for chunk in found)][:-1] == [c.start for c in found]
        assert found[-1].end == piece.end


def parts_of(name: str, first: str, second: str) -> tuple[Any, str, int]:
    """A chunker, a text with a boundary of its kind between two others, and how many chunks."""
    match name:
        case "markdown":
            return MarkdownChunker(), f"# A\n\n{first}\n\n## B\n\n{second}", 2
        case "code":
            text = f"def f():\n    return {first!r}\n\n\ndef g():\n    return {second!r}"
            return CodeChunker(min_tokens=0), text, 2
        case "dialogue":
            return DialogueChunker(min_tokens=0), f"User: {first}\nAssistant: {second}", 2
        case _:
            text = f"{first.strip()}\n\n{second.strip()}"
            return SentenceChunker(), text, len(re.split(r"\n\s*\n", text))


@pytest.mark.parametrize("edge", [edge for edge in EDGES if edge != "spaces"])
@pytest.mark.parametrize("name", ["markdown", "code", "dialogue", "sentence"])
def test_a_separator_is_found_in_every_tokenizer(
    tokenizer: PreTrainedTokenizerFast, name: str, edge: str
) -> None:
    """LMCache#1136: there it merged with its neighbours, and all was one segment."""
    chunker, text, n = parts_of(name, *EDGES[edge])
    prompt = render(tokenizer, Request.rag("r", [prose(1, 9), text, prose(2, 9)], "Why?"))
    found = [chunk for chunk in chunks(prompt, chunker) if chunk.text in text]
    assert len(found) == n
    assert text.startswith(found[0].text)
    assert text.endswith(found[-1].text)


def blocks_of(language: str) -> list[str]:
    """Six blocks that every kind of chunker cuts apart, in one language."""
    said = {
        "english": [
            "The bridge of stone was built in 1847.",
            "It crosses the river, e.g. by night!",
        ],
        "chinese": ["今天天气很好，我们去公园吧！", "桥是一八四七年建的，用石头做。"],
        "code": ["value = {'größe': 3, \"名\": [1.5, -2]}", "print(value['größe'])  # prüfen"],
        "emoji": ["Well 👍🏽 done 👩‍👩‍👧 e\u0301!", "Ok 🇩🇪🇫🇷, see you 🎉."],
    }[language]
    return [
        f"# Title {i}\n\n"
        + (" " if language != "chinese" else "").join((said * 3)[i % 2 : 4 + i % 3])
        for i in range(6)
    ]


def inner_ids(prompt: Prompt, chunker: Any) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for chunk in chunks(prompt, chunker):
        ids = chunk.ids[chunk.inner[0] : chunk.inner[1]].tolist()
        found.setdefault(chunk.text, set()).add((*ids,))
    return found


def assert_same_ids_everywhere(tokenizer: Any, name: str, language: str) -> None:
    """Of a chunk that stands in two prompts, behind and ahead of other text."""
    blocks = blocks_of(language)
    reordered = [blocks[3], blocks[0], blocks[1] + " #42", blocks[5], blocks[2]]
    chunker = chunker_of(name)
    joined = ["\n\n".join(order) for order in (blocks, reordered)]
    places = [
        [joined[0]],
        [joined[1]],
        [prose(1, 9), joined[0], blocks[4]],
        [blocks[2], joined[1]],
        [joined[0] + "\nmore"],
    ]
    prompts = [render(tokenizer, Request.rag("r", p, "Why?")) for p in places]
    found = [inner_ids(prompt, chunker) for prompt in prompts]
    shared = set(found[0]) & set(found[2])
    assert shared
    if name in ("sentence", "markdown"):
        assert set(found[0]) & set(found[1])
    for text in set().union(*found):
        assert len(set().union(*(one.get(text, set()) for one in found))) == 1, text


@pytest.mark.parametrize("language", ["english", "chinese", "code", "emoji"])
@pytest.mark.parametrize("name", CHUNKERS)
def test_a_chunk_has_the_same_ids_at_every_place(
    tokenizer: PreTrainedTokenizerFast, name: str, language: str
) -> None:
    assert_same_ids_everywhere(tokenizer, name, language)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("language", ["english", "chinese", "code", "emoji"])
@pytest.mark.parametrize("name", CHUNKERS)
def test_a_chunk_has_the_same_ids_at_every_place_of_the_real_tokenizer(
    name: str, language: str
) -> None:
    assert_same_ids_everywhere(real_tokenizer(), name, language)


@cache
def real_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(packaged_path("smollm2"))
