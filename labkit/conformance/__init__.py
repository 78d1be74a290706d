"""Contracts of the classes that a user may write, one per Protocol."""

from __future__ import annotations

from typing import Any

from labkit.conformance.attention_backend_and_resolver_checks import backend_checks, resolver_checks
from labkit.conformance.contract import Check, Compose, Contract, ContractError
from labkit.conformance.engine_checks import engine_checks, eviction_checks, queue_checks
from labkit.conformance.workload_and_source_checks import source_checks, workload_checks
from labkit.engine.attention import BACKEND_METHODS
from labkit.engine.engine_factory import ENGINE_METHODS
from labkit.workload import METHODS

CONTRACTS = (
    Contract("engine", ("submit", "step"), ENGINE_METHODS, engine_checks),
    Contract("attention backend", ("plan", "forward"), BACKEND_METHODS, backend_checks),
    Contract("workload", ("prepare", "load"), METHODS, workload_checks),
    Contract("source", ("make", "lengths"), ("identity", "make", "lengths"), source_checks),
    Contract("resolver", ("maps",), ("maps",), resolver_checks),
    Contract("queue", ("key",), ("key",), queue_checks),
    Contract("eviction policy", ("eviction_key",), ("eviction_key",), eviction_checks),
)


def contract_of(own_class: Any) -> Contract | None:
    """Return the contract that fits the methods of a class, or None if none fits.

    Of several that fit, it is the first one all of whose methods the class has.
    """
    fitting = [contract for contract in CONTRACTS if contract.fits(own_class)]
    return min(fitting, key=lambda contract: bool(contract.lacking(own_class)), default=None)


__all__ = ["CONTRACTS", "Check", "Compose", "Contract", "ContractError", "contract_of"]
