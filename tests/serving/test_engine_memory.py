"""What an engine holds is what the plan says, to the byte."""

from __future__ import annotations

import jax

from widemesh.serving import Engine
from widemesh.serving.memory_plan import plan_memory


def nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_state_and_parameters(engine: Engine) -> None:
    plan = plan_memory(engine.model_config, engine.config)
    for mesh, held in ((plan.prefill, engine.device.prefill), (plan.decode, engine.device.decode)):
        assert mesh.ranks == held.ranks
        state = {"page pool", "window rings", "compressor rings", "page tables"}
        planned = sum(part.num_bytes for part in mesh.parts if part.name in state)
        assert {part.name for part in mesh.parts} >= state
        assert nbytes(held.cache) == mesh.ranks * planned
    layout = engine.device.decode.cache.layout
    assert layout.page_bytes == plan.page_bytes == plan.bytes_per_token * engine.config.page_size
