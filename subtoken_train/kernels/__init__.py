"""Attention on packed storage: ``dispatch`` says which path runs, ``reference`` what all of them must equal."""
