"""Token tables against running the byte automaton token by token."""

import time

import numpy as np

from sage_jax.agent.code_blocks import fence_automaton
from sage_jax.sampling.automaton import compile_for, token_table

TOKENS = [b"```", b"`", b"``", b"python", b"py", b"\n", b"\n```", b"x", b"```python\n", b"`\nmore", b"<think>", b"</", b"think>", b""]


def test_table_equals_the_automaton():
    dfa = fence_automaton()
    table = token_table(dfa, TOKENS, vocab=20)
    assert table.dtype == np.int16 and table.shape == (len(dfa.transition), 20)
    for state in range(len(dfa.transition)):
        for i, token in enumerate(TOKENS):
            assert table[state, i] == dfa.run(token, state)
        assert (table[state, len(TOKENS):] == state).all()


def test_passing_through_accept_counts():
    dfa = fence_automaton()
    table = token_table(dfa, TOKENS, vocab=len(TOKENS))
    state = dfa.start
    for token in (b"```python\n", b"x", b"\n", b"``"):
        state = table[state, TOKENS.index(token)]
    assert state != dfa.accept and table[state, TOKENS.index(b"`\nmore")] == dfa.accept


class _Tokenizer:
    vocab_size = 150_000

    def token_bytes(self, i):
        return (b"tok%d" % i) * (1 + i % 3)


def test_large_vocabulary_is_quick_and_compiled_once():
    tokenizer = _Tokenizer()
    start = time.perf_counter()
    table = compile_for(fence_automaton(), tokenizer, 151_936)
    assert time.perf_counter() - start < 30  # a per-token Python loop over all states takes minutes
    assert compile_for(fence_automaton(), tokenizer, 151_936) is table
