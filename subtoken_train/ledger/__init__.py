"""The one place that knows a byte: budgets, nominal and measured caches, arithmetic operations."""
