"""Instruction records, collation with regions, Lightning's data module, and the embedded digit scenes."""
