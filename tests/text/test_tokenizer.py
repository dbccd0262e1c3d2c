from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.text.families import CORPUS, byte_level, sentencepiece
from tridentlm.errors import InvalidRequest
from tridentlm.hub import ModelFiles, default_model
from tridentlm.text import Tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": [{"type": "text", "text": "And 😀?"}]},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think %}<think>{% endif %}{% endif %}"
)


def files(folder: Path) -> ModelFiles:
    return ModelFiles("hf", folder, "small", folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face folder with a small tokenizer, and an empty cache beside it."""
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return folder


@pytest.mark.parametrize("text", [*CORPUS, "", "<|im_start|>user\nhi<|im_end|>"])
def test_encode_gives_transformers_ids(smollm: Tokenizer, folder: Path, text: str) -> None:
    assert Tokenizer.load(files(folder)).encode(text) == AutoTokenizer.from_pretrained(
        folder
    ).encode(text)
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


def test_chats_are_rendered_as_transformers_does(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(files(folder))
    flat = [{**m, "content": "And 😀?"} if isinstance(m["content"], list) else m for m in CHAT]
    for options in ({}, {"think": True}):
        expected = theirs.apply_chat_template(
            flat, add_generation_prompt=True, return_dict=False, **options
        )
        assert ours.encode_chat(CHAT, **options) == expected
    assert ours.render_chat(CHAT, think=True).endswith("[assistant]<think>")
    assert ours.render_chat(CHAT, add_generation_prompt=False).endswith("And 😀?")


def test_the_default_models_chat_format(smollm: Tokenizer) -> None:
    text = smollm.render_chat(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    )
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm.eos_token_ids == {2}
    assert smollm.vocab_size == 49152


def test_the_default_model_splits_digits_as_it_was_trained(smollm: Tokenizer) -> None:
    pieces = [smollm.decode([i]) for i in smollm.encode("Two:\n\n12.  34")]
    assert pieces == ["Two", ":", "\n\n", "1", "2", ".", "  ", "3", "4"]


def test_a_final_message_can_be_continued(smollm: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, my"}]
    assert smollm.render_chat(chat, continue_final_message=True).endswith("assistant\nHello, my")
    with pytest.raises(InvalidRequest, match="exclude"):
        smollm.render_chat(chat, continue_final_message=True, add_generation_prompt=True)


def test_developer_becomes_system_unless_the_template_knows_it(smollm: Tokenizer) -> None:
    chat = [{"role": "developer", "content": "D"}]
    assert "<|im_start|>system\nD<|im_end|>" in smollm.render_chat(chat)
    knows = Tokenizer(
        byte_level(), chat_template="{% if messages[0].role == 'developer' %}D{% endif %}"
    )
    assert knows.render_chat(chat) == "D"


@pytest.mark.parametrize(
    ("messages", "options", "param", "reason"),
    [
        ([], {}, "messages", "at least one"),
        ([{"role": "robot", "content": ""}], {}, "messages[0].role", "robot"),
        ([{"role": "tool", "content": ""}], {}, "messages", "no tools here"),
        (CHAT, {"tools": [1]}, "messages", "schema"),
        (CHAT, {"messages": []}, "chat_template_kwargs", "messages"),
        (CHAT, {"chat_template": "x"}, "chat_template_kwargs", "chat_template"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages", "Unicode"),
    ],
)
def test_bad_chats_are_refused(
    messages: Any, options: dict[str, Any], param: str, reason: str
) -> None:
    tokenizer = Tokenizer(byte_level(), chat_template=TEMPLATE, special_tokens={"bos_token": "<s>"})
    with pytest.raises(InvalidRequest, match=reason) as error:
        tokenizer.encode_chat(messages, **options)
    assert error.value.param == param


@pytest.mark.parametrize(
    "template", [None, "{% if %}", "{{ messages[0].content + 1 }}", "{{ 1/0 }}"]
)
def test_missing_and_broken_templates_fail_the_request_only(template: str | None) -> None:
    tokenizer = Tokenizer(byte_level(), chat_template=template)
    with pytest.raises(InvalidRequest, match="template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_a_prompt_that_is_no_unicode_is_refused(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as error:
        smollm.encode("half a pair \ud83d")
    assert error.value.param == "prompt"


def test_eos_ids_are_those_of_every_file(folder: Path) -> None:
    assert Tokenizer.load(files(folder)).eos_token_ids == {1}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert Tokenizer.load(files(folder)).eos_token_ids == {1, 2, 7}
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    assert Tokenizer.load(files(folder)).eos_token_ids == {1, 2, 7, 9}


def test_bos_is_added_where_the_config_says_so(folder: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece(strip=True),
        bos_token="<s>",
        eos_token="</s>",
        add_bos_token=True,
    ).save_pretrained(folder)
    tokenizer = Tokenizer.load(files(folder))
    assert tokenizer.encode("hi")[0] == 0
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"


def test_a_tokenizer_that_truncates_does_not_shorten_prompts(folder: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(files(folder))
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]


def test_the_second_load_reads_the_cache_without_torch() -> None:
    path = default_model()
    Tokenizer.load(ModelFiles("gguf", path, "m", path))
    code = (
        "import sys; from pathlib import Path; from tridentlm.hub import ModelFiles;"
        "from tridentlm.text import Tokenizer; path = Path(sys.argv[1]);"
        "Tokenizer.load(ModelFiles('gguf', path, 'm', path)).encode('hi');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_changed_template_is_read_again(folder: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert Tokenizer.load(files(folder)).render_chat(chat) == "<s>[user]hi[assistant]"
    (folder / "chat_template.jinja").write_text("changed")
    assert Tokenizer.load(files(folder)).render_chat(chat) == "changed"


def test_a_folder_without_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(InvalidRequest, match="cannot be loaded") as error:
        Tokenizer.load(files(folder))
    assert error.value.param == "tokenizer"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDENTLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "x.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        Tokenizer.load(ModelFiles("gguf", path, "x", path))
