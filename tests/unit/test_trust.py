"""What the README says of trust: what listens where, and who gets which part of the environment."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket

from listening import listeners

from milkweed.config import load_mesh
from milkweed.environments import run_python
from milkweed.environments.execution import CodeLimits
from milkweed.environments.session import Session
from milkweed.fleet import credentials, loopback


def rank(number: int, port: int, out: multiprocessing.Queue) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE="2")
    os.environ.update(loopback.ENVIRONMENT)
    loopback.keep_stores()
    loopback.keep_stores()
    dist.init_process_group("gloo")
    value = torch.ones(1) * number
    dist.all_reduce(value)
    out.put((value.item(), listeners(os.getpid())))
    dist.barrier()
    dist.destroy_process_group()


def test_process_groups_listen_on_loopback_only():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    ranks = [context.Process(target=rank, args=(i, port, out)) for i in range(2)]
    for process in ranks:
        process.start()
    answers = [out.get(timeout=60) for _ in ranks]
    for process in ranks:
        process.join(30)
    assert [value for value, _ in answers] == [1.0, 1.0]
    where = {address for _, addresses in answers for address in addresses}
    assert where == {"127.0.0.1"}


def test_what_the_environment_opens_is_said():
    assert loopback.opened({"PATH": "x", "GLOO_SOCKET_IFNAME": "lo"}) == []
    (said,) = loopback.opened({"UCX_NET_DEVICES": "eth0"})
    assert said.startswith("UCX_NET_DEVICES=eth0 in the environment") and "every machine that reaches it" in said


def test_a_gateway_that_others_can_reach_says_so(caplog):
    from milkweed.rollout.gateway import Gateway

    async def opened(host: str) -> list[str]:
        caplog.clear()
        async with Gateway(object(), object(), host=host):  # type: ignore[arg-type]
            return [r.getMessage() for r in caplog.records]

    assert asyncio.run(opened("127.0.0.1")) == []
    (said,) = asyncio.run(opened("0.0.0.0"))
    assert "open to every machine that reaches 0.0.0.0:" in said and "token" in said and "not encrypted" in said


def test_credentials_are_told_by_their_names():
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "SSH_AUTH_SOCK", "db_password"]
    plain = ["PATH", "TOKENIZERS_PARALLELISM", "MILKWEED_TOKEN", "KEYBOARD", "OMP_NUM_THREADS", "MONKEY"]
    env = dict.fromkeys([*secret, *plain], "x")
    over = credentials.emptied(env, allowed=("OPENAI_API_KEY",))
    assert sorted(over) == sorted(set(secret) - {"OPENAI_API_KEY"})
    env |= over
    credentials.drop_empty(env)
    assert sorted(env) == sorted(["OPENAI_API_KEY", *plain])


def test_tools_see_nothing_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WHERE_I_LIVE", "elsewhere")

    async def tool() -> str:
        session = Session(CodeLimits())
        try:
            return await session.run("shell", "env | cut -d= -f1 | sort")
        finally:
            await session.close()

    ran = run_python("import os; print(*sorted(os.environ), sep='\\n')")
    for seen in (ran.stdout, asyncio.run(tool())):
        names = set(seen.split()) - {"_", "PWD", "OLDPWD", "SHLVL"}
        assert "HOME" in names and names <= {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "HOME", "TMPDIR", "OMP_NUM_THREADS", "PYTHONHASHSEED"}, names


def test_the_mesh_file_names_the_credentials_that_rewards_get():
    mesh = load_mesh("local", ['reward.credentials=["OPENAI_API_KEY"]'])
    assert mesh.reward.credentials == ("OPENAI_API_KEY",) and mesh.environment.credentials == ()


def test_serving_takes_its_token_from_a_variable_of_its_own(monkeypatch, capsys):
    from milkweed import cli

    seen = []
    monkeypatch.setattr(cli, "serve_model", lambda arguments: seen.append(arguments.token) or 0)
    monkeypatch.setenv("MILKWEED_TOKEN", "names-the-run")
    assert cli.main(["serve", "model"]) == 0 and seen == [""]
    monkeypatch.setenv("MILKWEED_API_KEY", "opens-the-gateway")
    assert cli.main(["serve", "model"]) == 0 and seen == ["", "opens-the-gateway"]
