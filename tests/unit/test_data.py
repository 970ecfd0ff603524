"""Sources, splits and streams of prompts, and a model's tokenizer."""

import json
import subprocess
import sys

import pytest

from milkweed.data import (
    Chat,
    PromptStream,
    arithmetic,
    check_disjoint,
    from_hf_folder,
    from_jsonl,
    from_list,
    from_reasoning_gym,
    split,
)
from milkweed.errors import DataError
from milkweed.types import Prompt

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A model folder with a character tokenizer and no weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted({c for c in map(chr, range(32, 127))} | {"\n"})
    vocab = {"<|im_start|>": 0, "<|im_end|>": 1} | {c: i + 2 for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        json.dumps({"vocab_size": len(vocab), "eos_token_id": 1, "max_position_embeddings": 64})
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_jsonl_names_the_file_and_line_of_what_is_wrong(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "1+1?", "a": "2", "level": 3}\n\n{"q": "2+2?", "a": "4"}\n')
    prompts = from_jsonl(path, prompt="q", answer="a")
    assert [(p.text, p.answer) for p in prompts] == [("1+1?", "2"), ("2+2?", "4")]
    assert prompts[0].info == {"level": 3}
    assert from_jsonl(path, prompt=lambda r: r["q"].upper(), answer=None, limit=1)[0].answer is None
    with pytest.raises(DataError, match=r"a\.jsonl:1: no 'prompt'.*it has q, a, level"):
        from_jsonl(path)
    path.write_text('{"prompt": "x", "answer": 1}\n{oops\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not JSON"):
        from_jsonl(path)
    with pytest.raises(DataError, match="missing.jsonl"):
        from_jsonl(tmp_path / "missing.jsonl")
    path.write_text("")
    with pytest.raises(DataError, match="no prompts"):
        from_jsonl(path)


def test_hf_folders_of_arrow_parquet_and_jsonl_are_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({"prompt": ["a?", "b?"], "answer": ["1", "2"], "k": [7, 8]})
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    with pa.OSFile(str(saved / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    parquet.write_table(table, hub / "train-00000-of-00001.parquet")
    (hub / "training.jsonl").write_text('{"prompt": "not of this split", "answer": 0}\n')
    (hub / "test.jsonl").write_text('{"prompt": [{"role": "user", "content": "c?"}], "answer": 3}\n')
    for folder in (tmp_path / "saved", tmp_path / "hub"):
        prompts = from_hf_folder(folder, split="train")
        assert [(p.text, p.answer, p.info["k"]) for p in prompts] == [("a?", "1", 7), ("b?", "2", 8)]
    assert from_hf_folder(tmp_path / "hub", split="test")[0].text == "c?"
    with pytest.raises(DataError, match="no split 'test'; it has train"):
        from_hf_folder(tmp_path / "saved", split="test")
    with pytest.raises(DataError, match="no file of split 'dev'"):
        from_hf_folder(tmp_path / "hub", split="dev")


def test_lists_take_what_people_have_in_hand():
    prompts = from_list(["q", ("r", 1), {"prompt": "s", "answer": 2, "id": "x"}, Prompt(id="y", messages=[])])
    assert [p.id for p in prompts] == ["list:0", "list:1", "x", "y"] and prompts[1].answer == 1
    with pytest.raises(DataError, match="list:0: unknown keys"):
        from_list([{"question": "q"}])
    with pytest.raises(DataError, match="'x' occurs twice"):
        from_list([{"prompt": "s", "id": "x"}, {"prompt": "t", "id": "x"}])
    with pytest.raises(DataError, match="empty"):
        from_list(["  "])


def test_reasoning_gym_by_name():
    first, again = (from_reasoning_gym("chain_sum", 4, 7, max_terms=3) for _ in range(2))
    assert first == again and len({p.id for p in first}) == 4
    assert first[0].info["reasoning_gym"]["entry"]["answer"] == first[0].answer
    with pytest.raises(DataError, match="did you mean chain_sum"):
        from_reasoning_gym("chain_sums", 4, 7)
    with pytest.raises(DataError, match="max_termz"):
        from_reasoning_gym("chain_sum", 4, 7, max_termz=3)


def test_arithmetic_pairs_never_meet_across_the_split():
    prompts = arithmetic(digits=2, question="{a:02d}+{b:02d}=", answer="{value:03d}")
    assert len(prompts) == 10_000 == len({p.id for p in prompts})
    train, held_out = split(prompts, 0.1)
    assert 800 < len(held_out) < 1200

    def pairs(side):
        return {frozenset((p.info["a"], p.info["b"])) for p in side}

    assert not pairs(train) & pairs(held_out)
    assert all(int(p.answer) == p.info["a"] + p.info["b"] and len(p.answer) == 3 for p in prompts)
    with pytest.raises(DataError, match="100 pairs"):
        arithmetic(digits=1, size=101)


def test_a_split_is_stable_by_key_and_proves_itself_disjoint():
    prompts = from_list([(f"What is {i}?", i) for i in range(300)])
    train, held_out = split(prompts, 0.2, seed=3)
    assert split(list(reversed(prompts))[:200], 0.2, seed=3).held_out[-1] in held_out  # no prompt changes sides
    assert {p.id for p in split(prompts[:150], 0.2, seed=3).held_out} <= {p.id for p in held_out}
    assert len(split(prompts, 40).held_out) == 40
    twins = [Prompt(id="x", messages=[{"role": "user", "content": " what IS  5?"}])]
    with pytest.raises(DataError, match="share the key"):
        check_disjoint(twins, [p for p in prompts if p.answer == 5])
    with pytest.raises(DataError, match="share the text"):
        split([*prompts, *twins], 0.5, key=lambda p: p.id, seed=_seed_that_parts("x", "list:5"))
    with pytest.raises(DataError, match="both must have some"):
        split(prompts[:1], 1)


def _seed_that_parts(a, b):
    from milkweed.data.split import _unit

    return next(s for s in range(100) if (_unit(a, s) < 0.5) != (_unit(b, s) < 0.5))


def test_S3_S4_S5_a_stream_restored_anywhere_goes_on_as_if_uninterrupted():
    prompts = from_list([str(i) for i in range(7)])
    straight = [p.id for p in PromptStream(prompts, seed=5).take(40)]
    for stop in (1, 6, 7, 8, 14, 21, 30):  # 7, 14, 21: exactly at an epoch's end
        first = PromptStream(prompts, seed=5)
        head = [p.id for p in first.take(stop)]
        second = PromptStream(prompts, seed=99)
        second.take(3)
        second.restore(json.loads(json.dumps(first.state())))
        assert head + [p.id for p in second.take(40 - stop)] == straight
        assert second.taken == 40
    epochs = [straight[i : i + 7] for i in range(0, 35, 7)]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs) and len({tuple(e) for e in epochs}) > 1


def test_S7_a_stream_refuses_the_position_of_other_prompts():
    state = PromptStream(from_list(["a", "b"])).state()
    other = PromptStream(from_list(["a", "c"]))
    before = other.state()
    with pytest.raises(DataError, match="another data set"):
        other.restore(state)
    with pytest.raises(DataError, match="not the state"):
        other.restore({})
    assert other.state() == before


def test_a_chat_renders_with_the_models_own_template(model):
    chat = Chat(model)
    messages = [{"role": "user", "content": "2+2?"}]
    assert chat.decode(chat.ids(messages), skip_special_tokens=False) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.eos_id == 1 == chat.pad_id and chat.context == 64
    (prompt,) = chat.render(from_list([("2+2?", "4")]))
    assert prompt.token_ids == chat.ids(messages)
    example = chat.supervised(prompt)
    trained = [t for t, m in zip(example.token_ids, example.loss_mask, strict=True) if m]
    assert chat.decode(trained, skip_special_tokens=False) == "4<|im_end|>"
    assert chat.decode(trained) == "4"


def test_ids_are_those_that_transformers_gives(model):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(model / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = TEMPLATE
    messages = [
        {"role": "system", "content": "Be terse.\n"},
        {"role": "user", "content": " 2+2? <b>&amp;</b> "},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?\n\n"},
    ]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert Chat(model).ids(messages, add_generation_prompt=prompt) == expected


def test_T8_no_character_of_a_message_is_stripped(model):
    text = Chat(model).text([{"role": "user", "content": "  a \n"}], add_generation_prompt=False)
    assert text == "<|im_start|>user\n  a \n<|im_end|>\n"


def test_a_prompt_longer_than_the_context_is_named_or_dropped(model):
    chat = Chat(model)
    prompts = from_list([{"prompt": "x" * 80, "id": "long"}, {"prompt": "y", "id": "short"}])
    with pytest.raises(DataError, match="'long' has .* more than 63 .*context"):
        chat.render(prompts)
    assert [p.id for p in chat.render(prompts, too_long="drop")] == ["short"]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vocab_size": 50}, "tokenizer.json does not fit the model: token .* has id"),
        ("config.json", {"eos_token_id": 5000}, "config.json: eos_token_id 5000"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "tokenizer_config.json: eos_token '</s>'"),
    ],
)
def test_a_tokenizer_that_does_not_match_its_model_is_refused_by_file(model, file, change, message):
    edit(model / file, **change)
    with pytest.raises(DataError, match=message):
        Chat(model)


def test_missing_files_are_named(model):
    (model / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="no chat template"):
        Chat(model).ids([{"role": "user", "content": "x"}])
    assert Chat(model, template="{{ messages[0].content }}").ids([{"role": "user", "content": "ab"}])
    with pytest.raises(DataError, match="does not parse"):
        Chat(model, template="{% if %}")
    with pytest.raises(DataError, match="roles \\['user'\\]: no user"):
        Chat(model, template="{{ raise_exception('no user') }}").ids([{"role": "user", "content": "x"}])
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer.json: not a tokenizer"):
        Chat(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="tokenizer.json: missing"):
        Chat(model)
    (model / "config.json").unlink()
    with pytest.raises(DataError, match="config.json: missing"):
        Chat(model)


def test_the_data_layer_brings_neither_torch_nor_transformers(model):
    code = (
        "import sys, milkweed.data as d; c = d.Chat(sys.argv[1]); c.render(d.from_list(['x']));"
        "print(sorted(m for m in ('torch', 'transformers', 'datasets', 'reasoning_gym') if m in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "[]", out.stderr
