"""Make the debug models and the debug text under debug_models/, once, on this machine.

    python tools/make_debug_models.py

debug_models/dense                     tiny Qwen3, tied embeddings, one safetensors file
debug_models/moe                       tiny Qwen3-MoE, untied, two shards with an index
debug_models/text/{train,validation}.jsonl   sources of Python's standard library, one {"text": ...} a row
debug_models/chat/{train,validation}.jsonl   conversations about sums and dates: several turns, reasoning, tool calls

The folders have the layout of a Qwen3 folder from the hub, so loading them is the same code as loading Qwen/Qwen3-8B.
Everything is drawn from a seed: the same Python, packages and processor family give the same bytes. run.sh calls this
when a config needs it.
"""

import datetime
import json
import random
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.logging import disable_progress_bar

SEED = 0
# Every size differs from every other, and heads x head_dim from hidden: a transposed or defaulted size cannot hide.
SHARED = dict(vocab_size=1536, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
SHARED |= dict(rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0})
SHARED |= dict(
    attention_bias=False, attention_dropout=0.0, hidden_act="silu", initializer_range=0.06
)  # 0.02 is for wide models
DENSE = SHARED | dict(hidden_size=96, num_hidden_layers=3, head_dim=32, intermediate_size=224, tie_word_embeddings=True)
# Hidden and expert widths are different multiples of 128: the NKI kernels take this model too.
MOE = SHARED | dict(hidden_size=256, num_hidden_layers=2, head_dim=48, intermediate_size=320, tie_word_embeddings=False)
MOE |= dict(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
MOE |= dict(router_aux_loss_coef=0.001, decoder_sparse_step=1, mlp_only_layers=[])

# Qwen's special tokens in Qwen's order; they get the ids after the BPE vocabulary. The second group is not "special" in
# Qwen3 either: decoding with skip_special_tokens keeps it.
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions you may call, one JSON object a line:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- 'To call one, write {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.<|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last_user = namespace(index=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last_user.index = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('a system message must come first') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {#- As in Qwen3, reasoning shows only after the last user turn, and the last turn always has a think block. #}
        {%- set content, reasoning = message.content or '', message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > last_user.index and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {#- Results of one round of calls share a user turn. #}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Modules that are one .py file in every CPython 3.11-3.14; no module is in both lists.
TRAIN_MODULES = (
    "ast bdb calendar codecs configparser csv dataclasses enum fractions functools heapq ipaddress "
    "pickle plistlib pprint random shutil statistics textwrap threading traceback uuid"
)
VALIDATION_MODULES = "bisect copy fileinput ftplib shlex tempfile"


def stdlib_documents(modules: str) -> list[str]:
    """Return the sources of standard-library modules, given as names with spaces between, cut into documents.

    Cuts are before top-level functions and classes, where at least 200 characters have gathered.
    """
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for name in modules.split():
        path = stdlib / f"{name}.py"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: the debug text is made of Python's standard-library sources. "
                "Use a Python installation that has its .py files, or set [data] to text of your own."
            )
        document = ""
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.startswith(("def ", "class ", "@")) and len(document) >= 200:
                documents.append(document)
                document = ""
            document += line
        documents.append(document)
    return [document.strip() + "\n" for document in documents]


WEEKDAY_TOOL = {
    "type": "function",
    "function": {
        "name": "weekday",
        "description": "The day of the week of a date.",
        "parameters": {"type": "object", "properties": {"date": {"type": "string"}}, "required": ["date"]},
    },
}


def chat_rows(count: int, seed: int) -> list[dict]:
    """Conversations whose answers can be learnt: sums with reasoning, and weekdays that a tool is asked for."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        messages = [{"role": "system", "content": "You answer in one line."}] if number % 3 == 0 else []
        for _ in range(draw.randint(1, 4)):
            a, b = draw.randint(1, 50), draw.randint(1, 50)
            messages.append({"role": "user", "content": f"What is {a} plus {b}?"})
            answer = {"role": "assistant", "content": f"{a} + {b} = {a + b}"}
            messages.append(answer | ({"reasoning_content": f"{a} and {b} make {a + b}."} if number % 2 else {}))
        row = {"messages": messages}
        if number % 4 == 0:
            day = datetime.date(2026, 1, 1) + datetime.timedelta(days=draw.randint(0, 364))
            function = {"name": "weekday", "arguments": {"date": day.isoformat()}}
            messages += [
                {"role": "user", "content": f"And which day is {day.isoformat()}?"},
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
                {"role": "tool", "content": f"{day:%A}"},
                {"role": "assistant", "content": f"It is a {day:%A}."},
            ]
            row["tools"] = [WEEKDAY_TOOL]
        rows.append(row)
    return rows


def tiny_tokenizer(texts: Iterable[str], vocab_size: int = 1400) -> Qwen2Tokenizer:
    """Train a byte-level BPE tokenizer in Qwen's form on texts.

    vocab_size counts the 256 bytes, the merges learnt and the added tokens, which come last. As in Qwen3's chat models
    the end token is <|im_end|>, the padding token <|endoftext|>, and there is no begin token.
    """
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(merge) for merge in learnt["merges"]],
        unk_token=None,
        eos_token=None,  # set below: named here, they would get their ids before <|im_start|>
        pad_token=None,
        model_max_length=SHARED["max_position_embeddings"],
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_model(
    folder: Path,
    config: Qwen3Config | Qwen3MoeConfig,
    tokenizer: Qwen2Tokenizer,
    seed: int = SEED,
    max_shard_size: str = "5GB",
) -> None:
    """Write a Hugging Face folder with random float32 weights: std config.initializer_range, drawn from seed."""
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config.eos_token_id = end  # no pad_token_id, as in Qwen3: Transformers would start that row of the embedding at 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = Qwen3MoeForCausalLM if isinstance(config, Qwen3MoeConfig) else Qwen3ForCausalLM
        model = model_class(config).float()
    # Chat turns end in <|im_end|>, documents in <|endoftext|>: generation stops at both, as Qwen3's does.
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)


def make_debug_models(folder: Path) -> None:
    """Make text/, chat/, dense/ and moe/ under folder; those that exist and are newer than this file stay as they are.

    Each is built in a temporary folder and renamed, so an interrupted run leaves nothing that looks complete.
    """
    folder = Path(folder)
    changed = Path(__file__).stat().st_mtime
    paths = [folder / name for name in ("text", "chat", "dense", "moe")]
    missing = [path.name for path in paths if not path.is_dir() or path.stat().st_mtime <= changed]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as building:
        train = stdlib_documents(TRAIN_MODULES)
        tokenizer = tiny_tokenizer(train)
        for name in missing:
            target = Path(building) / name
            target.mkdir()
            if name == "text":
                write_jsonl(target / "train.jsonl", ({"text": d} for d in train))
                write_jsonl(target / "validation.jsonl", ({"text": d} for d in stdlib_documents(VALIDATION_MODULES)))
            elif name == "chat":
                write_jsonl(target / "train.jsonl", chat_rows(400, seed=SEED))
                write_jsonl(target / "validation.jsonl", chat_rows(40, seed=SEED + 1))
            elif name == "dense":
                save_model(target, Qwen3Config(**DENSE), tokenizer)
            else:
                save_model(target, Qwen3MoeConfig(**MOE), tokenizer, max_shard_size="6MB")  # two shards and an index
            if (folder / name).is_dir():
                (folder / name).rename(Path(building) / f"{name}.old")
            try:
                target.rename(folder / name)
            except OSError:
                if not (folder / name).is_dir():  # otherwise another run made it meanwhile, with the same bytes
                    raise


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """Write one row a line."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    disable_progress_bar()
    make_debug_models(Path(__file__).resolve().parent.parent / "debug_models")
