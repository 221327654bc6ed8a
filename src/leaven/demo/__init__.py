"""The whole way on one machine: text, tune, transfer, train three ways, report."""
