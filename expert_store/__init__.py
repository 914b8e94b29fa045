"""How expert weights lie in shared memory, and how they get there.

Without torch: ``layout`` (where every byte lies), ``segment`` (the memfd and views of it),
``checkpoint`` (files and headers), ``memory`` (is there room), ``reports`` (what the loader says).
In the loader process and in workers: ``families`` and ``gates`` (what transformers' experts
compute), ``keys`` (which tensor goes where), ``conversion``, ``reading`` and ``loader``.
"""
