"""Parser of PTX text into basic blocks of instructions."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from .errors import PTXError

OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?(\S+)\s*(.*)")
LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
ENDS = ("bra", "bra.uni", "ret")  # opcodes that end a block


class Address(NamedTuple):
    """Address [register + offset] in bytes."""

    register: str
    offset: int


Operand = str | tuple[str, ...] | Address  # register, parameter, number or label; vector; memory address


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: Opcode with all modifiers and types.
        operands: Operands, with the destination first.
        predicate: Register that must be true, or None if the instruction is always executed.
        negated: Whether the register must be false instead.
        text: Text of the instruction and its source line.
    """

    opcode: str
    operands: tuple[Operand, ...]
    predicate: str | None
    negated: bool
    text: str


class BasicBlock(NamedTuple):
    """Instructions without a branch, and the blocks that follow.

    Attributes:
        instructions: All instructions except the branch.
        branch: Branch at the end, or None if execution continues with the next block.
        taken: Number of the target block of the branch, or None for the end of the program.
        following: Number of the next block, or None after an unconditional branch.
    """

    instructions: list[Instruction]
    branch: Instruction | None
    taken: int | None
    following: int | None


class Kernel(NamedTuple):
    """Kernel: name, types of parameters by name, and blocks. The first block is the entry."""

    name: str
    parameters: dict[str, str]
    blocks: list[BasicBlock]


def parse(ptx: str) -> Kernel:
    """Parse a module with one kernel of one warp."""
    name, parameters = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, re.S).groups()
    if not re.search(r"\.reqntid\s+32\b", ptx):
        raise PTXError(f"{name}: programs of more than one warp are not supported")
    types = {name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", parameters)}
    return Kernel(name, types, _blocks(*_instructions(ptx)))


def _instructions(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions, and for each label the index of the instruction after it."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]+)"', ptx))
    body = ptx[ptx.index("{", ptx.index(".reqntid")) :].split(".section")[0]
    instructions, labels, source = [], {}, "no source line"
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        if location := LOCATION.match(line):
            file, number, outer_file, outer = location.groups()
            source = f"{files.get(file, file)}:{number}"
            source += f" inlined at {files.get(outer_file, outer_file)}:{outer}" if outer else ""
        elif label := re.fullmatch(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
        elif not line.startswith(".") and line not in ("{", "}"):
            statements = filter(None, map(str.strip, line.split(";")))
            instructions += [_instruction(statement, source) for statement in statements]
    return instructions, labels


def _instruction(text: str, source: str) -> Instruction:
    negation, predicate, opcode, operands = STATEMENT.fullmatch(text).groups()
    parsed = tuple(map(_operand, OPERAND.findall(operands)))
    return Instruction(opcode, parsed, predicate, negation == "!", f"{text} ({source})")


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(text.strip("{} ").replace(",", " ").split())
    if not text.startswith("["):
        return text
    base, _, offset = text.strip("[]").partition("+")
    return Address(base.strip(), int(offset or "0", 0)) if base.strip().startswith("%") else base.strip()


def _blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[BasicBlock]:
    ends = [n + 1 for n, instruction in enumerate(instructions) if instruction.opcode in ENDS]
    targets = [labels[instructions[end - 1].operands[0]] for end in ends if instructions[end - 1].operands]
    starts = sorted({0, *ends, *targets} - {len(instructions)})
    blocks = []
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(instructions)], strict=True)):
        last = instructions[stop - 1]
        if last.opcode not in ENDS:
            blocks.append(BasicBlock(instructions[start:stop], None, None, number + 1))
            continue
        taken = starts.index(labels[last.operands[0]]) if last.operands else None
        following = None if last.predicate is None else number + 1
        blocks.append(BasicBlock(instructions[start : stop - 1], last, taken, following))
    return blocks
