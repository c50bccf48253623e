"""The adapter folder: PEFT-loadable LoRA, routers in their own file, a schema-versioned config, a model card."""
