"""An OpenAI-compatible server on compressed caches: requests, contexts that are kept, one answer at a time, HTTP."""
