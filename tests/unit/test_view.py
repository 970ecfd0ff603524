"""The view: a line a step where there is no terminal, a panel where there is one."""

import io

from rich.console import Console

from milkweed.observe.view import View, duration, sparkline


def row(reward):
    return {"reward": reward, "loss": 0.1, "version": "0.1", "tokens_per_s": 900.0, "time": {"step": 1.0, "generate": 0.6, "train": 0.3}}


def test_without_a_terminal_there_is_one_line_a_step():
    out = io.StringIO()
    with View("run", 4, console=Console(file=out, width=200)) as view:
        for step in range(1, 5):
            view.update(step, row(step / 4))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and "step 4/4 reward 1.000 loss +0.1000 tokens/s 900 weights 0.1" in lines[-1] and "generate 0.60" in lines[-1]


def test_on_a_terminal_the_panel_shows_reward_time_and_weights():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with View("run", 4, console=console, live=True) as view:
        view.update(1, row(0.25))
        view.held_out(1, 0.2)
        view.update(2, row(0.75))
    text = out.getvalue()
    assert "reward" in text and "held-out" in text and "0.1" in text


def test_sparkline_averages_down_and_survives_flat_values():
    assert sparkline([1.0] * 5) == "▁" * 5
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline(list(map(float, range(1000))), width=20)) == 20


def test_duration_reads_as_a_clock():
    assert (duration(75), duration(3675)) == ("1:15", "1:01:15")
