"""The public names and their signatures: what people's scripts stand on. A change here is a change for them."""

import inspect

import milkweed as mw

SIGNATURES = {
    "up": "(mesh: 'str | Path | MeshConfig' = 'local', *, model: 'str | Path', trainer: 'TrainerConfig | None' = None, run_dir: 'str | Path | None' = None, roles: 'Sequence[str]' = ",
    "start": "(config: 'RunConfig', **options: 'Any')",
    "main": "(recipe: 'Callable[[C], Awaitable[Any]]', config: 'type[C]', argv: 'Sequence[str] | None' = None)",
    "run_sync": "(work: 'Awaitable[T]')",
    "batch": "(groups: 'Sequence[Group]', advantages: 'Callable[[torch.Tensor, torch.Tensor], torch.Tensor]', *, row_len: 'int' = 0, normalise: 'str | tuple[str, float]' = 'token'",
    "split": "(prompts: 'Sequence[Prompt]', held_out: 'float | int' = 0.1, *, seed: 'int' = 0, key: 'Key' = ",
    "single_turn": "(reward: 'Reward', *, deadline_s: 'float | None' = None, sampling: 'Sampling | None' = None)",
    "load_mesh": "(path_or_name: 'str | Path' = 'local', overrides: 'tuple[str, ...] | list[str]' = ())",
}


def test_every_public_name_loads_and_is_documented():
    for name in mw.__all__:
        value = getattr(mw, name)
        if name != "__version__" and (inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)):
            assert (value.__doc__ or "").strip(), f"mw.{name} has no docstring"
    assert set(mw.__all__) <= set(dir(mw))


def test_signatures_are_what_scripts_rely_on():
    for name, expected in SIGNATURES.items():
        found = str(inspect.signature(getattr(mw, name)))
        assert found.startswith(expected), f"mw.{name}{found}"


def test_an_unknown_name_is_refused_as_in_any_module():
    assert not hasattr(mw, "no_such_name")
