from __future__ import annotations

import gzip
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from kvmig.core.errors import ConfigError
from kvmig_tools.sim import cost
from kvmig_tools.sim.lengths import BURSTGPT_IN, BURSTGPT_OUT, SHAREGPT_IN, SHAREGPT_OUT, Quantiles
from kvmig_tools.sim.traces import read
from kvmig_tools.sim.workloads import PAPER_SEED, gaps, generate


# The paper's Table 1: P50, P80, P95, P99.
@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("S-S", (38, 113, 413, 1464)),
        ("M-M", (32, 173, 1288, 4208)),
        ("L-L", (55, 582, 3113, 5166)),
    ],
)
def test_the_papers_seed_gives_its_table_exactly(name: str, table: tuple[int, ...]) -> None:
    inputs = [one.input_tokens for one in generate(name, 1.0)]
    assert tuple(int(np.percentile(inputs, share)) for share in (50, 80, 95, 99)) == table


@pytest.mark.parametrize("lengths", [SHAREGPT_IN, SHAREGPT_OUT, BURSTGPT_IN, BURSTGPT_OUT])
def test_real_lengths_have_the_tables_mean_and_percentiles(lengths: Quantiles) -> None:
    drawn = lengths.draw(np.random.RandomState(1), 200_000)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    for share, tokens in lengths.points[:-1]:
        assert np.percentile(drawn, 100 * share) == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("cv", [1.0, 2.0, 8.0])
def test_gaps_have_the_rate_and_the_variation(cv: float) -> None:
    drawn = gaps(np.random.RandomState(2), 400_000, 5.0, cv)
    assert drawn.mean() == pytest.approx(0.2, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05)


def test_the_same_seed_gives_the_same_requests() -> None:
    def rows(seed: int) -> list[tuple[float, int, int]]:
        made = generate("M-M", 7.6, count=200, seed=seed, high_share=0.1)
        return [(one.arrival, one.input_tokens, one.priority) for one in made]

    assert rows(PAPER_SEED) == rows(PAPER_SEED)
    assert rows(1) != rows(2)


def test_a_share_of_requests_has_high_priority() -> None:
    made = generate("S-S", 34.0, high_share=0.1)
    assert sum(one.priority < 0 for one in made) == pytest.approx(1000, rel=0.1)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_trace_is_read_plain_or_compressed(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens\n0,5,6\n1.5,7,8\n"
    plain = write(tmp_path / "t.csv", text)
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    for path in (plain, packed):
        rows = [(one.arrival, one.input_tokens, one.final_tokens) for one in read(path)]
        assert rows == [(0.0, 5, 11), (1.5, 7, 15)]
    assert [one.arrival for one in read(plain, rate=2.0)] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arrival_s,input_tokens\n", ":1: column output_tokens is missing"),
        ("arrival_s,input_tokens,output_tokens,x\n", ":1: unknown column 'x'"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n0,-5,1\n", ":3: input_tokens is '-5'"),
        ("arrival_s,input_tokens,output_tokens\n0,1,many\n", ":2: output_tokens is 'many'"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", ":2: 2 values, must be 3"),
        ("arrival_s,input_tokens,output_tokens\n2,1,1\n1,1,1\n", ":3: arrival_s is '1'"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", ":2: arrival_s is 'nan'"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "bad.csv", text)
    with pytest.raises(ConfigError) as caught:
        list(read(path))
    assert f"{path}{says}" in str(caught.value)


@pytest.mark.parametrize("name", cost.known())
def test_cost_models_that_come_along_load(name: str) -> None:
    assert cost.load(name).name == name


def test_a_bad_cost_model_is_named_by_file_and_field(tmp_path: Path) -> None:
    good = Path(str(files("kvmig_tools.sim").joinpath("gpus", "a10-llama7b.toml"))).read_text()
    path = write(tmp_path / "bad.toml", good.replace("blocks = 851", "blocks = -1"))
    with pytest.raises(ConfigError, match=r"capacity.blocks is -1, must be 1 or more"):
        cost.load(str(path))
    write(path, good.replace("blocks = 851", "blocks = 'x'"))
    with pytest.raises(ConfigError, match=r"capacity.blocks"):
        cost.load(str(path))
