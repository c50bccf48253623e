"""An OpenAI-compatible server on compressed caches: requests, contexts that are kept, answers made together, HTTP."""
