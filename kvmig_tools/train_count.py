"""Train the bundled counting checkpoint: `python -m kvmig_tools.train_count --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from tqdm import tqdm
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PERIOD = 10_000  # four digits, wrapping 9999 -> 0000
MAX_LEN = 8192
SPECIALS = ("pad", "bos", "eos", "system", "user", "assistant", "from", "end")
ID = {name: 256 + i for i, name in enumerate(SPECIALS)}

# The model reads four digits, users also write "42": the template appends the conversation's last
# number, padded, so that the answer starts there. Only whole words count as numbers, and an
# answer's last number may be cut short by max_tokens, so there only four digits will do.
CHAT_TEMPLATE = """\
{%- set ns = namespace(start='') -%}
{%- for message in messages -%}
{%- set role = message['role'] if message['role'] in ('system', 'assistant') else 'user' -%}
{{- '<|' ~ role ~ '|>' ~ message['content'] ~ '<|end|>' -}}
{%- for word in (message['content'] | string).split() -%}
{%- set word = word.strip('.,:;!?()[]"*`' ~ "'") -%}
{%- if word.isascii() and word.isdecimal() and role != 'system'
    and (word | length == 4 or (role == 'user' and word | length < 4)) -%}
{%- set ns.start = ('000' ~ word)[-4:] -%}
{%- endif -%}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|from|>' ~ (ns.start or '0000') ~ '<|assistant|>' -}}
{%- endif -%}"""

WORDS = """
    a all an and answer are as at be begin both by can count counting do down each even every few
    first for from go good have hello help here how I in is it just keep last let like line long
    many me more my never next no not now number numbers of on one only or our out please pick
    point resume say sequence shall so some start steps stop tell thank that the their then there
    these they this time to until up us very want was we what when where which while with write
    you your Count Continue Hello Please Start System Write
""".split()  # noqa: SIM905
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHI\n\t-_"


@dataclass(frozen=True)
class Phase:
    """So many steps of batches of `rows` sequences of `length` tokens."""

    steps: int
    rows: int
    length: int


# Growing lengths: the short rows teach the rule, the long ones keep attention sharp over
# thousands of keys.
PHASES = (Phase(600, 24, 160), Phase(250, 6, 640), Phase(120, 2, 2048), Phase(70, 1, MAX_LEN))
QUICK = (Phase(20, 8, 128), Phase(5, 1, 512))


def numbers(start: int, count: int) -> str:
    """`count` numbers from `start` on, space-separated."""
    return " ".join(f"{(start + i) % PERIOD:04d}" for i in range(count))


def random_start(rng: random.Random, count: int) -> int:
    """Any start; half of them so that a carry over a random width falls into the run."""
    if rng.random() < 0.5:
        return rng.randrange(PERIOD)
    width = 10 ** rng.randint(1, 4)
    carry = rng.randrange(width, PERIOD + 1, width)
    return (carry - rng.randint(1, max(1, count - 1))) % PERIOD


def random_text(rng: random.Random) -> str:
    """Some words, a short number now and then, a few odd bytes."""
    parts = []
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13))):
        kind = rng.random()
        if kind < 0.06:
            parts.append(str(rng.randrange(10 ** rng.randint(1, 3))))
        elif kind < 0.12:
            odd = (rng.choice((rng.randint(33, 47), rng.randint(58, 0x2FFF))) for _ in range(3))
            parts.append("".join(map(chr, odd)))
        elif kind < 0.2:
            parts.append("".join(rng.choice(LETTERS) for _ in range(6)))
        else:
            parts.append(rng.choice(WORDS) + rng.choice(("", "", "", ",", ".", "?", ":", "\n")))
    return rng.choice((" ", " ", "\n", ". ", "")) + " ".join(parts)


def sequence(rng: random.Random, length: int) -> tuple[list[int], list[bool], list[int]]:
    """Tokens, which of them are to be predicted, and positions (with gaps) of one row.

    A row is a chain of segments, text then a count; the text goes unpredicted.
    """
    tokens: list[int] = []
    wanted: list[bool] = []
    positions: list[int] = []
    room, position = MAX_LEN - length, 0

    def put(ids: list[int], predict: bool) -> None:
        nonlocal position
        tokens.extend(ids)
        wanted.extend([predict] * len(ids))
        positions.extend(range(position, position + len(ids)))
        position += len(ids)

    one_run = rng.random() < 0.3  # a single count that fills the row
    while len(tokens) < length:
        # Positions are relative, so a leap here stands for far-away context at no cost.
        leap = rng.randint(0, room) if rng.random() < 0.5 else 0
        room, position = room - leap, position + leap
        count = length // 4 if one_run else rng.choice((1, 2, 4, 8, 16, 16))
        start = random_start(rng, min(count, 50))
        text = list(random_text(rng).encode())
        kind = rng.random()
        if kind < 0.75:  # "text 0017" and on, one sign at most after the first number
            bare = not tokens and rng.random() < 0.3
            if not bare:
                put(text + list(rng.choice((" ", "\n", ": ", ":\n", ", ")).encode()), False)
            put(list(numbers(start, 1).encode()), False)
            put(list(rng.choice(".,:;!?\n").encode()) if rng.random() < 0.2 else [], False)
            start += 1
        elif kind < 0.9:  # the end of a chat's prompt: the count begins with the number given
            put([ID[rng.choice(("user", "system"))], *text, ID["end"], ID["from"]], False)
            put([*numbers(start, 1).encode(), ID["assistant"]], False)
        else:  # no number to start from
            put([*rng.choice(WORDS).encode(), *text, *rng.choice(WORDS).encode()], False)
            start = 0
        lead = "" if tokens[-1] == ID["assistant"] else " "
        put(list((lead + numbers(start, count)).encode()), True)
    return tokens[:length], wanted[:length], positions[:length]


def build_tokenizer() -> Tokenizer:
    """One token per UTF-8 byte, no merges, so that every digit is a token of its own."""
    byte_chars = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's printable bytes
    others = [byte for byte in range(256) if byte not in byte_chars]
    vocab = {chr(byte): byte for byte in byte_chars}
    vocab |= {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|{name}|>", normalized=False, special=True) for name in SPECIALS]
    )
    return tokenizer


def build_model(seed: int) -> LlamaForCausalLM:
    """The untrained network; 64 is a head size that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256 + len(SPECIALS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=ID["bos"],
        eos_token_id=ID["eos"],
        pad_token_id=ID["pad"],
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, phases: tuple[Phase, ...], seed: int) -> None:
    """AdamW, a short warm-up, then a cosine down to a twentieth of the peak."""
    rng, peak = random.Random(seed), 3e-3  # noqa: S311
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    plan = [phase for phase in phases for _ in range(phase.steps)]
    warm_up = min(50, len(plan))
    model.train()
    for step, phase in enumerate(bar := tqdm(plan, desc="train", mininterval=2.0)):
        cosine = 0.525 + 0.475 * math.cos(math.pi * step / len(plan))
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / warm_up, cosine)
        rows = [sequence(rng, phase.length) for _ in range(phase.rows)]
        ids, wanted, positions = (torch.tensor(part) for part in zip(*rows, strict=True))
        # The mask of ones keeps transformers from taking leaps in position for packed rows.
        hidden = model.model(ids, attention_mask=torch.ones_like(ids), position_ids=positions)[0]
        logits, right = model.lm_head(hidden[:, :-1][wanted[:, 1:]]), ids[:, 1:][wanted[:, 1:]]
        loss = functional.cross_entropy(logits, right)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            wrong = f"{int((logits.argmax(-1) != right).sum())}/{len(right)}"
            bar.set_postfix(loss=f"{loss.item():.5f}", wrong=wrong, length=phase.length)
    model.eval()


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Write the checkpoint folder, weights in bfloat16."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer = build_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@torch.inference_mode()
def all_right(model: LlamaForCausalLM, name: str, cases: list[tuple[str, str]]) -> bool:
    """Greedy continuations, token by token over a KV cache, of equally long prompts."""
    tokenizer = build_tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt).ids for prompt, _ in cases])
    wanted = torch.tensor([tokenizer.encode(answer).ids for _, answer in cases])
    cache, right = DynamicCache(config=model.config), 0
    for i in tqdm(range(wanted.shape[1]), desc=name, mininterval=2.0):
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        right += int((ids[:, 0] == wanted[:, i]).sum())
    print(f"{name}: {right}/{wanted.numel()} tokens right")
    return right == wanted.numel()


@torch.inference_mode()
def every_number_right(model: LlamaForCausalLM) -> bool:
    """All 10,000 steps from number to number, read in rows of the full context."""
    right = total = 0
    per_row = MAX_LEN // 5
    for start in tqdm(range(0, PERIOD, per_row), desc="every number"):
        ids = torch.tensor([list((numbers(start, per_row + 1)).encode())[:MAX_LEN]])
        hits = model(ids).logits[0, 3:-1].argmax(-1) == ids[0, 4:]
        right, total = right + int(hits.sum()), total + len(hits)
    print(f"every number: {right}/{total} tokens right")
    return right == total


def verify(out: Path, tokens: int) -> bool:
    """Whether the saved checkpoint is right everywhere it was asked."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    count = tokens // 5
    starts = (18, 0, 990, 4567, 8999, 9980, 1234, 9499)
    # A chat's answer begins with the number given, elsewhere the next one follows.
    chat = "<|user|>Count from {0}<|end|><|from|>{0}<|assistant|>", "{0} {1}"
    checks = [every_number_right(model)]
    for name, (prompt, answer), history in (
        ("text", ("Count on from {0}: {0}", " {1}"), 1),
        ("chat", chat, 1),
        ("long prompts", ("Count: {0}", " {1}"), 700),
    ):
        runs = [(numbers(s - history + 1, history), numbers(s + 1, count)) for s in starts]
        checks.append(
            all_right(model, name, [(prompt.format(*r), answer.format(*r)) for r in runs])
        )
    return all(checks)


def main() -> int:
    """Train, save, verify."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few steps only: tries the script")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    model = build_model(args.seed)
    train(model, QUICK if args.quick else PHASES, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, args.out)
    print(f"trained in {(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if verify(args.out, 200 if args.quick else 3000) else 1


if __name__ == "__main__":
    sys.exit(main())
