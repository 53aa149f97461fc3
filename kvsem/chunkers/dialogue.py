"""Dialogue: one turn a chunk."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from kvsem.chunkers.base import ahead_of_space, check_lengths, pack
from kvsem.types import Span

_BREAK = re.compile(r"\r\n?|\n")
_BLANK = re.compile(r"[^\S\r\n]*(?:[\r\n]|$)")
_PARAGRAPH = re.compile(r"(?:\r\n|\r(?!\n)|\n)[^\S\r\n]*[\r\n]\s*")
# What may stand ahead of a speaker: quotation or heading marks, a time, a list mark, emphasis.
_LEAD = r"[ \t]*(?:[>#]{1,6}[ \t]*|[-*•][ \t]+)?(?:[\[(]?\d{1,2}:\d{2}(?::\d{2})?[\])]?[ \t]*)?"
# A speaker: up to four words, perhaps an office in brackets, in bold or in brackets as a whole, and
# a colon, which may be full-width.
_WORDS = r"[^\W\d_][\w.'’-]*(?: [\w.'’-]+){0,3}(?: ?\([^:\r\n]{0,80}\))?"
_NAME = rf"[\[(<]?(?:\*\*|__)?(?P<name>{_WORDS})[\])>]?(?:\*\*|__)?"
_SPEAKER = re.compile(rf"{_LEAD}{_NAME}[ \t]?[:：](?:\*\*|__)?(?=\s|[^\x00-\x7f]|$)")
_CHATML = re.compile(r"<\|(?:im_start|start_header_id|user|assistant|system)\|>|\[INST\]")
_ROLES = frozenset(
    [
        *("user", "assistant", "system", "human", "ai", "bot", "agent", "customer", "operator"),
        *("tool", "speaker", "interviewer", "interviewee", "doctor", "patient", "teacher"),
        *("student", "q", "a", "question", "answer"),
        *("用户", "助手", "系统", "客户", "客服", "问", "答"),
    ]
)
_TRANSCRIPT = 4  # lines with a name, from which on it may be a transcript


class DialogueChunker:
    """Turns: a speaker and a colon at the start of a line (``User:``, ``**Ana:**``, ``用户：``).

    Roles are known. Another name counts where it stands at the head of two lines or more and
    another speaker does too, or where most lines have one, so that ``Note:`` in prose opens
    nothing. The marks of chat templates open turns as well. A turn shorter than ``min_tokens``
    takes in the next one; one above ``max_tokens`` is cut at its blank lines. White space belongs
    to the chunk that follows it.

    Locality: an edit changes the chunk of its own turn, and at most the one behind a short turn.
    """

    def __init__(self, max_tokens: int = 256, min_tokens: int = 16) -> None:
        check_lengths(max_tokens, min_tokens)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens

    def split(self, text: str) -> list[Span]:
        starts = {found.end(): False for found in _PARAGRAPH.finditer(text)}
        starts |= dict.fromkeys(_turns(text), True)
        blocks = [(ahead_of_space(text, at), starts[at]) for at in sorted(starts)]
        return pack(text, blocks, self.max_tokens, self.min_tokens)


def _turns(text: str) -> Iterator[int]:
    """Where turns start: the first character of their line."""
    lines = [0, *(found.end() for found in _BREAK.finditer(text))]
    named = [(at, found["name"].casefold()) for at in lines if (found := _SPEAKER.match(text, at))]
    n_lines = sum(not _BLANK.match(text, at) for at in lines)
    speakers = _speakers([name for _, name in named], n_lines)
    yield from (at for at, name in named if name in speakers)
    yield from (at for at in lines if _CHATML.match(text, at))


def _speakers(names: Sequence[str], n_lines: int) -> set[str]:
    """Roles, and what comes up again beside another; all names where most lines have one."""
    counts = Counter(names)
    if len(counts) > 1 and len(names) >= max(_TRANSCRIPT, n_lines / 2):
        return set(counts)
    roles = {name for name in counts if name.split()[0] in _ROLES}
    again = {name for name, times in counts.items() if times > 1}
    return roles | again if len(roles | again) > 1 else roles
