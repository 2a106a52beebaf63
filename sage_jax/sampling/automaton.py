"""Byte automata as token tables: the stop condition that the sampler follows on the device.

Owns the compilation of a byte automaton and a vocabulary into `next_state[state, token]`. What the automaton means is
its maker's business (the agent's fence rule); this room only follows it.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import numpy as np


class ByteAutomaton(Protocol):
    """transition int [states, 256]; one accepting state."""

    transition: np.ndarray
    start: int
    accept: int


def token_table(automaton: ByteAutomaton, tokens: list[bytes], vocab: int) -> np.ndarray:
    """int16 [states, vocab]: the state after each token from each state.

    The accepting state is absorbing, so a token that passes through it in its middle counts as accepted. Ids at and
    above `len(tokens)` (padding of the vocabulary) and empty tokens leave the state as it is.
    Cost: states times all bytes of the vocabulary (45 states and 150,000 tokens: about a second).
    """
    if len(tokens) > vocab:
        raise ValueError(f"{len(tokens)} tokens do not fit a table of {vocab}")
    transition = np.asarray(automaton.transition, np.int16).copy()
    transition[automaton.accept] = automaton.accept
    states = len(transition)
    lengths = np.fromiter((len(t) for t in tokens), np.int64, len(tokens))
    order = np.argsort(-lengths, kind="stable")  # longest first: the tokens with a byte at position i are a prefix
    sorted_lengths = lengths[order]
    flat = np.frombuffer(b"".join(tokens[i] for i in order), np.uint8)
    offsets = np.concatenate([[0], np.cumsum(sorted_lengths)])[:-1]
    current = np.repeat(np.arange(states, dtype=np.int16)[:, None], len(tokens), axis=1)
    for position in range(int(lengths.max(initial=0))):
        count = int(np.searchsorted(-sorted_lengths, -position, side="left"))  # tokens longer than `position`
        current[:, :count] = transition[current[:, :count], flat[offsets[:count] + position][None, :]]
    table = np.repeat(np.arange(states, dtype=np.int16)[:, None], vocab, axis=1)
    table[:, order] = current
    return table


_CACHE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # tokenizer -> {(automaton bytes, vocab): table}


def compile_for(automaton: ByteAutomaton, tokenizer, vocab: int) -> np.ndarray:
    """`token_table` for a tokenizer (`vocab_size`, `token_bytes(id)`), compiled once per tokenizer object."""
    key = (np.asarray(automaton.transition).tobytes(), automaton.accept, vocab)
    tables = _CACHE.setdefault(tokenizer, {})
    if key not in tables:
        tables[key] = token_table(automaton, [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)], vocab)
    return tables[key]
