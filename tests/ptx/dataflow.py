"""What instructions tell without being executed: which registers are needed, and which tensors are written."""

from .parse import Block, Kernel


def live_registers(blocks: list[Block]) -> list[set[str]]:
    """Return the registers and parameters that each block, or one that may follow it, reads before writing."""
    live = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(blocks))):
            block = blocks[number]
            needed = set().union(*(live[successor] for successor in block.successors))
            for instruction in reversed([*block.instructions, *filter(None, [block.branch])]):
                needed = (needed - instruction.written) | instruction.read
            changed |= needed != live[number]
            live[number] = needed
    return live


def stored_parameters(kernel: Kernel) -> set[str]:
    """Return the parameters that addresses of stores are computed from."""
    instructions = [instruction for block in kernel.blocks for instruction in block.instructions]
    origins: dict[str, set[str]] = {name: {name} for name in kernel.parameters}
    changed = True
    while changed:
        changed = False
        for instruction in instructions:
            if instruction.opcode.startswith("ld.global"):
                continue
            found = set().union(*(origins.get(name, set()) for name in instruction.read))
            for name in instruction.written:
                changed |= not found <= origins.get(name, set())
                origins[name] = origins.get(name, set()) | found
    stores = [i.operands[0].register for i in instructions if i.opcode.startswith("st.global")]
    return set().union(*(origins.get(register, set()) for register in stores))
