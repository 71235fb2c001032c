"""Text becomes the tokens that the package tokenizers gives, and only what is to be answered is judged."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from onnxgrad_cli.data import Range, SequenceOptions, open_data
from onnxgrad_cli.errors import OnnxgradError, UsageError
from onnxgrad_cli.ir.types import tensor_type
from onnxgrad_cli.metadata import Term
from tests.data.conftest import WORDS
from tests.data.leading_facts import raises_first
from tests.facts import facts, raises

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

PLACES = tensor_type(TensorProto.INT64, ["batch", "length"])
PORTS = {"input_ids": PLACES, "attention_mask": PLACES, "label": PLACES}
CAUSAL = [Term("causal-lm", "logits", "label", 1.0, 99, -100, -1)]
CHAT = [
    {"role": "user", "content": "what is the sky ?"},
    {"role": "assistant", "content": "blue"},
    {"role": "user", "content": "and the grass ?"},
    {"role": "assistant", "content": "it is green"},
]
THINKING = (  # as Qwen3's: only the last answer shows where thoughts would be
    "{%- for m in messages %}{%- set last = loop.last %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and last %}it {% endif %}{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split(" ")]


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def batch(path: Path, tokenizer: Path, inputs: Any = PORTS, terms: Any = CAUSAL, **options: Any) -> Any:
    chosen = SequenceOptions(tokenizer, **options)
    data = open_data(path, inputs, terms=terms, options=chosen)
    return data.batch(np.arange(len(data)))


def test_the_completion_alone_is_judged(tmp_path: Path, tokenizer: Path) -> None:
    records = [
        {"prompt": "what is the sky ? ", "completion": "blue"},
        {"prompt": "the grass is ", "completion": "green and blue"},
    ]
    first = [*ids("<s> what is the sky ? blue </s>"), 0]
    second = [*ids("<s> the grass is green and blue </s>"), 0]
    found = batch(lines(tmp_path / "a.jsonl", records), tokenizer)
    np.testing.assert_array_equal(found["input_ids"], [first[:8], second[:8]])
    hidden = [-100] * 6
    np.testing.assert_array_equal(found["label"], [hidden + first[6:8], [-100] * 4 + second[4:8]])
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(records)
    for same in ("a.parquet", "a.csv"):
        other = batch(tmp_path / same, tokenizer / "tokenizer.json")
        assert all((found[name] == other[name]).all() for name in found)


def test_an_end_that_the_tokenizer_adds_is_judged(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "the sky is ", "completion": "blue"}])
    before = batch(path, tokenizer)
    file = tokenizer / "tokenizer.json"
    found = json.loads(file.read_text())
    found["post_processor"]["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    found["post_processor"]["special_tokens"]["</s>"] = {"id": "</s>", "ids": ids("</s>"), "tokens": ["</s>"]}
    file.write_text(json.dumps(found))
    after = batch(path, tokenizer)
    np.testing.assert_array_equal(after["label"], [[-100] * 4 + ids("blue </s>")])
    assert all((after[name] == before[name]).all() for name in before)


def test_all_of_a_text_is_judged(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "the sky is blue"}, {"text": "grass </s>"}])
    found = batch(path, tokenizer, pad_id=7)
    np.testing.assert_array_equal(
        found["input_ids"], [ids("<s> the sky is blue </s>"), [*ids("<s> grass </s>"), 7, 7, 7]]
    )
    np.testing.assert_array_equal(found["label"][1], [-100, *ids("grass </s>"), -100, -100, -100])
    np.testing.assert_array_equal(found["attention_mask"], [[1] * 6, [1, 1, 1, 0, 0, 0]])


def test_what_the_assistant_says_is_judged(tmp_path: Path, tokenizer: Path) -> None:
    told: list[str] = []
    path = lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    data = open_data(
        path, PORTS, terms=CAUSAL, options=SequenceOptions(tokenizer), tell=lambda text, _: told.append(text)
    )
    found = data.batch(np.arange(1))
    turns = [
        ("<|im_start|> user \n what is the sky ? <|im_end|> \n <|im_start|> assistant \n", False),
        ("blue <|im_end|> \n", True),
        ("<|im_start|> user \n and the grass ? <|im_end|> \n <|im_start|> assistant \n", False),
        ("it is green <|im_end|> \n", True),
    ]
    wanted = [(token, judged) for text, judged in turns for token in ids(text)]
    assert found["input_ids"][0].tolist() == [token for token, _ in wanted]
    assert found["label"][0].tolist() == [token if judged else -100 for token, judged in wanted]
    assert "'tokenizer.json'" in told[0].replace(f"{tokenizer}/", "") and "ChatML" in told[0]


def test_conversations_as_prompt_and_completion(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": CHAT[:3], "completion": CHAT[3:]}])
    label = batch(path, tokenizer)["label"][0]
    assert label[label != -100].tolist() == ids("it is green <|im_end|> \n")


@pytest.mark.parametrize("in_settings", [True, False])
def test_a_template_that_writes_earlier_answers_otherwise(tmp_path: Path, tokenizer: Path, in_settings: bool) -> None:
    if in_settings:
        settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
        several = [{"name": "tools", "template": "no"}, {"name": "default", "template": THINKING}]
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": several}))
    else:
        (tokenizer / "chat_template.jinja").write_text(THINKING)
    told: list[str] = []
    path = lines(tmp_path / "a.jsonl", [{"messages": CHAT}, {"messages": CHAT[:2]}])
    data = open_data(
        path, PORTS, terms=CAUSAL, options=SequenceOptions(tokenizer), tell=lambda text, _: told.append(text)
    )
    labels = data.batch(np.arange(2))["label"]
    assert [row[row != -100].tolist() for row in labels] == [
        ids("it it is green <|im_end|>"), ids("it blue <|im_end|>")
    ]  # fmt: skip
    assert told[0].startswith("in 1 conversations, ")


def test_texts_of_a_classifier(tmp_path: Path, tokenizer: Path) -> None:
    inputs = {"input_ids": PLACES, "token_type_ids": PLACES, "label": tensor_type(TensorProto.INT64, ["batch"])}
    path = lines(tmp_path / "a.jsonl", [{"text": "the sky", "label": 1}, {"text": "green", "label": 0}])
    found = batch(path, tokenizer, inputs, [Term("cross-entropy", "logits", "label", 1.0, 2, -100)])
    np.testing.assert_array_equal(found["input_ids"], [ids("<s> the sky </s>"), [*ids("<s> green </s>"), 0]])
    assert found["label"].tolist() == [1, 0] and not found["token_type_ids"].any()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"other": "x"}, ("missing_value", "a.jsonl", "1")),
        ({"text": 3}, ("missing_value", "a.jsonl", "1")),
        ({"prompt": "a"}, ("wrong_type", "a.jsonl", "1", "prompt", "completion")),
        ({"messages": "a"}, ("wrong_type", "a.jsonl", "1", "messages")),
        ({"messages": []}, ("wrong_type", "a.jsonl", "1", "messages")),
        ({"messages": [{"role": "user"}]}, ("missing_value", "a.jsonl", "1", "messages", "role", "content")),
        ({"prompt": CHAT[:1], "completion": "blue"}, ("wrong_type", "a.jsonl", "1", "completion")),
        ({"messages": CHAT[:1]}, ("no_data", "a.jsonl")),
    ],
)
def test_text_that_is_none(tmp_path: Path, tokenizer: Path, record: dict[str, Any], said: tuple[str, ...]) -> None:
    with raises(UsageError, *said):
        batch(lines(tmp_path / "a.jsonl", [record]), tokenizer)


def test_files_that_hold_no_text(tmp_path: Path, tokenizer: Path) -> None:
    np.savez(tmp_path / "a.npz", input_ids=np.zeros((2, 2), int))
    with raises(UsageError, "wrong_type", "tokenizer", "a.npz"):
        batch(tmp_path / "a.npz", tokenizer)
    with raises(OnnxgradError, "missing_file", "gone.jsonl"):
        batch(tmp_path / "gone.jsonl", tokenizer)
    path = lines(tmp_path / "a.jsonl", [{"text": "the"}, {"messages": CHAT}])
    with raises(UsageError, "wrong_type", "a.jsonl", "2"):
        batch(path, tokenizer)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}']
)
def test_tokenizers_that_are_none(tmp_path: Path, tokenizer: Path, content: bytes) -> None:
    (tokenizer / "tokenizer.json").write_bytes(content)
    with raises_first(OnnxgradError, "unreadable_file", "tokenizer.json"):
        batch(lines(tmp_path / "a.jsonl", [{"text": "the"}]), tokenizer)


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


@pytest.mark.parametrize(
    ("part", "component"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLED] * 40}),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 40}] * 2}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}),
        (
            "post_processor",
            {
                "type": "TemplateProcessing", "pair": [], "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 9,
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1] * 120, "tokens": ["<s>"] * 120}},
            },
        ),
    ],
)  # fmt: skip
def test_tokenizers_that_make_much_of_a_word(tmp_path: Path, tokenizer: Path, part: str, component: object) -> None:
    file = tokenizer / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: component}))
    with raises_first(OnnxgradError, "unreadable_file", "tokenizer.json") as told:
        batch(lines(tmp_path / "a.jsonl", [{"text": "the"}]), tokenizer)
    assert facts(told.value)[-1] == "1,000"


@pytest.mark.parametrize("content", ["[]", "{", '{"a": ' * 10_000])
def test_settings_that_are_none(tmp_path: Path, tokenizer: Path, content: str) -> None:
    (tokenizer / "tokenizer_config.json").write_text(content)
    with raises_first(OnnxgradError, "unreadable_file", "tokenizer_config.json"):
        batch(lines(tmp_path / "a.jsonl", [{"text": "the"}]), tokenizer)


def test_a_tokenizer_of_another_model(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "the sky is green"}])
    with raises(UsageError, "wrong_value", "a.jsonl", "input_ids", "9", "0", "0", "2", "0", "8", "9"):
        open_data(path, PORTS, {"input_ids": Range(0, 8, why="it indexes a table of 9 rows")}, terms=CAUSAL,
                  options=SequenceOptions(tokenizer))  # fmt: skip


# -- templates of strangers --------------------------------------------------------------------------------
