"""Data sets through `datasets`: shapes of public ones, read from local files, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from experiments.run import entry
from kvsem.errors import DataError, SettingError
from kvsem.types import Request
from kvsem.workloads.hub import HubWorkload
from kvsem.workloads.jsonl import JsonlWorkload

SQUAD: list[dict[str, Any]] = [
    {
        "id": f"5733{i}",
        "title": "Bridges",
        "context": f"Bridge {i} is made of stone.",
        "question": "Of what?",
        "answers": {"text": ["stone", "of stone"], "answer_start": [20, 17]},
    }
    for i in range(6)
]
HOTPOT = {
    "id": "5a7a",
    "question": "Who built it?",
    "answer": "the company",
    "context": {
        "title": ["Bridge", "River", "Empty"],
        "sentences": [["It is old.", " A company built it."], ["It is long."], ["  "]],
    },
}
CHAT = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "She."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "In 1847."},
]
SQUAD_FIELDS = {
    "id": "id",
    "passages": "context",
    "question": "question",
    "answers": "answers.text",
    "group": "title",
}


def saved(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> Path:
    """The rows as a file of the kind that ``name`` ends in."""
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    else:
        data = datasets.Dataset.from_list(list(rows))
        {".parquet": data.to_parquet, ".csv": data.to_csv, ".json": data.to_json}[path.suffix](path)
    return path


def one(folder: Path, row: dict[str, Any], **settings: Any) -> Request:
    (request,) = HubWorkload(saved(folder, row), **settings)
    return request


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.json"])
@pytest.mark.parametrize("limit", [None, 3])
def test_like_squad(tmp_path: Path, name: str, limit: int | None) -> None:
    path = saved(tmp_path, *SQUAD, name=name)
    workload = HubWorkload(path, fields=SQUAD_FIELDS, limit=limit, max_new_tokens=5)
    want = [
        Request.rag(
            row["id"],
            [row["context"]],
            "Of what?",
            answers=("stone", "of stone"),
            max_new_tokens=5,
            group="Bridges",
        )
        for row in SQUAD[:limit]
    ]
    assert list(workload) == list(workload) == want
    assert len(workload) == len(want)
    assert workload.ingest


@pytest.mark.parametrize("titled", [True, False])
def test_like_hotpotqa(tmp_path: Path, titled: bool) -> None:
    """Passages are lists of sentences inside an object; a blank one is left out."""
    texts = "context.sentences"
    passages: Any = {"title": "context.title", "text": texts} if titled else texts
    fields = {"passages": passages, "question": "question", "answers": "answer"}
    request = one(tmp_path, HOTPOT, fields=fields)
    ahead = ("Bridge\n", "River\n") if titled else ("", "")
    assert request.segments("passage") == (
        ahead[0] + "It is old. A company built it.",
        ahead[1] + "It is long.",
    )
    assert (request.id, request.answers) == ("row-0", ("the company",))


def test_passages_that_are_objects_or_in_several_fields(tmp_path: Path) -> None:
    row = {
        "docs": [{"title": "T", "body": "One."}, {"title": None, "body": "Two."}],
        "more": "Three.",
        "q": "Why?",
        "a": [4, 5],
    }
    fields = {"passages": ["docs.body", "more"], "question": "q", "answers": "a"}
    request = one(tmp_path, row, fields=fields)
    assert request.segments("passage") == ("One.", "Two.", "Three.")
    assert request.answers == ("4", "5")
    fields["passages"] = "docs.1.body"
    assert one(tmp_path, row, fields=fields).segments("passage") == ("Two.",)
    fields["passages"] = {"title": "docs.title", "text": "docs.body"}  # type: ignore[assignment]
    assert one(tmp_path, row, fields=fields).segments("passage") == ("T\nOne.", "Two.")


SHAPES: dict[str, Any] = {
    "openai": CHAT,
    "sharegpt": [
        {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
        for m in CHAT
    ],
    "pairs": [{"user": "Who?", "bot": "She."}, {"user": "When?", "bot": "In 1847."}],
    "in turn": [m["content"] for m in CHAT],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_like_a_chat(tmp_path: Path, shape: str) -> None:
    row = {"turns": SHAPES[shape], "key": 7, "rule": "Be brief."}
    fields = {"messages": "turns", "id": "key", "system": "rule"}
    path = saved(tmp_path, row)
    first, second = HubWorkload(path, fields=fields, conversations=True, ingest=False)
    assert [m.content for m in first.messages] == ["Be brief.", "Who?"]
    assert [(m.role, m.content) for m in second.messages] == [
        ("system", "Be brief."),
        ("user", "Who?"),
        ("assistant", "She."),
        ("user", "When?"),
    ]
    assert [(r.id, r.group, r.answers) for r in (first, second)] == [
        ("7/turn-1", "7", ("She.",)),
        ("7/turn-2", "7", ("In 1847.",)),
    ]
    with pytest.raises(DataError, match=r"row 0: the last message is .*conversations=true"):
        HubWorkload(path, fields=fields)


def test_a_question_as_messages_and_a_prompt(tmp_path: Path) -> None:
    assert one(tmp_path, {"q": "Why?"}, fields={"messages": "q"}).segments("question") == ("Why?",)
    assert one(tmp_path, {"q": "Why"}, fields={"prompt": "q"}).text == "Why"


def test_donor_and_target(tmp_path: Path) -> None:
    row = {"sentence1": "A cat sat.", "sentence2": "The cat sat.", "label": 1}
    request = one(tmp_path, row, fields={"donor": "sentence1", "target": "sentence2"})
    assert (request.donors, request.segments("target")) == (("A cat sat.",), ("The cat sat.",))


def test_without_fields_rows_are_records(tmp_path: Path) -> None:
    """As the jsonl workload reads them; nulls that Arrow fills in count as absent."""
    rows = [
        {"id": "r", "passages": ["One."], "question": "Why?", "system": "Be brief."},
        {"id": "s", "passages": ["Two."], "question": "How?", "answers": ["so"]},
    ]
    path = saved(tmp_path, *rows)
    assert list(HubWorkload(path)) == list(JsonlWorkload(path))


def test_csv(tmp_path: Path) -> None:
    rows = [{"text": "One, two.", "q.short": "Why?", "n": i} for i in range(3)]
    path = saved(tmp_path, *rows, name="rows.csv")
    fields = {"passages": "text", "question": "q.short", "answers": "n"}
    requests = list(HubWorkload(path, fields=fields))
    assert [r.answers for r in requests] == [("0",), ("1",), ("2",)]
    assert requests[0] == Request.rag("row-0", ["One, two."], "Why?", answers=("0",))


def test_a_folder_and_its_splits(tmp_path: Path) -> None:
    saved(tmp_path, *SQUAD, name="train.parquet")
    saved(tmp_path, *SQUAD[:2], name="validation.parquet")
    assert len(HubWorkload(tmp_path, fields=SQUAD_FIELDS)) == 6
    assert len(HubWorkload(tmp_path, fields=SQUAD_FIELDS, split="validation")) == 2
    with pytest.raises(DataError, match=r"test.*validation") as error:
        HubWorkload(tmp_path, fields=SQUAD_FIELDS, split="test")
    assert "\n" not in str(error.value)


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    """Nor does a local file leave a copy in a cache: 40 MB, and its end is broken."""
    path = tmp_path / "big.jsonl"
    line = json.dumps({"id": "x", "passages": ["word " * 2000], "question": "Why?"})
    with path.open("w", encoding="utf-8") as file:
        for i in range(4000):
            file.write(line.replace('"x"', f'"{i}"') + "\n")
        file.write("{broken\n")
    assert [r.id for r in HubWorkload(path, limit=2)] == ["0", "1"]
    with pytest.raises(DataError, match="cannot be read"):
        HubWorkload(path)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize("limit", [None, 2])
def test_offline_what_was_loaded_before_is_read(cache: Path, limit: int | None) -> None:
    """The cache of a data set that was loaded once, by its name."""
    folder = cache / "bridges"
    folder.mkdir()
    saved(folder, *SQUAD, name="train.jsonl")
    datasets.load_dataset(str(folder))
    workload = HubWorkload("bridges", fields=SQUAD_FIELDS, limit=limit)
    assert [r.id for r in workload] == [row["id"] for row in SQUAD[:limit]]


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("name", ["bridges", "somebody/bridges"])
def test_offline_with_nothing_cached_is_one_line(cache: Path, name: str, limit: int | None) -> None:
    with pytest.raises(DataError, match=f"'{name}': the hub cannot be reached.* cache") as error:
        HubWorkload(name, limit=limit)
    assert "\n" not in str(error.value)


def test_a_field_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    path = saved(tmp_path, *SQUAD)
    for name in ("contxt", "answers.txt", "title.text", "answers.text.9"):
        with pytest.raises(SettingError) as error:
            HubWorkload(path, fields={**SQUAD_FIELDS, "passages": name})
        assert str(error.value) == (
            f"workload.fields.passages={name!r}: expected one of id, title, context, question, "
            "answers, answers.text, answers.answer_start"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": None}, r"workload\.path=None: expected a data set of the hub, a folder"),
        ({"limit": 0}, r"workload\.limit=0"),
        ({"max_new_tokens": "4"}, r"workload\.max_new_tokens='4'"),
        ({"fields": {"passage": "context"}}, r"workload\.fields='passage': expected some of id"),
        ({"fields": {"question": 3}}, r"workload\.fields\.question=3: expected the name"),
        ({"fields": {"passages": {"text": "context"}}}, r"workload\.fields\.passages=\{'text'"),
    ],
)
def test_settings_out_of_range(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as error:
        HubWorkload(**{"path": saved(tmp_path, *SQUAD)} | settings)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.docx").write_bytes(b"x")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "none.jsonl").write_text("", encoding="utf-8")
    for name, message in {
        "absent.json": "no such file or folder",
        "empty": "cannot be read",
        "notes.docx": r"workload\.path=.*expected a data set of the hub, a folder, or a \.json",
        "broken.parquet": "cannot be read",
        "none.jsonl": r"no rows in split 'train'|cannot be read",
    }.items():
        with pytest.raises((DataError, SettingError), match=message) as error:
            HubWorkload(tmp_path / name)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([{"a": "x", "b": None}], {"passages": "a", "question": "b"}, "row 0: no known form"),
        (
            [{"a": "x", "b": "y"}] * 2,
            {"passages": "a", "question": "b", "id": "b"},
            "row 1: \"id\" 'y' is taken by row 0",
        ),
        ([{"a": "x", "b": ["y"]}], {"passages": "a", "question": "b"}, 'row 0: "question" is'),
        (
            [{"a": ["x"], "b": ["y", "z"], "c": "w"}],
            {"passages": {"title": "a", "text": "b"}, "question": "c"},
            "row 0: 1 titles of 2 passages",
        ),
        (
            [{"a": [{"from": "robot", "value": "x"}]}],
            {"messages": "a"},
            r"row 0: \"messages\"\[0\]\[\"role\"\] is 'robot'",
        ),
    ],
)
def test_rows_that_are_no_requests(
    tmp_path: Path, rows: list[dict[str, Any]], fields: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path, *rows)
    with pytest.raises(DataError, match=message) as error:
        HubWorkload(path, fields=fields)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["workload.path", "a data set of the hub"]),
        (["workload.path={path}", "workload.fields={{pasages: context}}"], ["pasages", "passages"]),
        (
            ["workload.path={path}", "workload.fields={{passages: contxt, question: question}}"],
            ["workload.fields.passages", "contxt", "answers.text"],
        ),
        (["workload.path={path}", "workload.split=test"], ["test", "train"]),
        (["workload.path=some/bridges"], ["some/bridges", "cannot be reached"]),
    ],
)
def test_from_the_command_line(
    cache: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    path = saved(cache, *SQUAD)
    assert entry(["workload=hub", *(a.format(path=path) for a in arguments)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines
