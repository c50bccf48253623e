"""Backbone families, LoRA, loading, and the attachment of reducers and routers."""
