"""Write the pages that a program makes and a code host shows: methods, families, fields, schemas, pictures.

python docs/generate.py             # a test checks that the pages are what it writes
"""

import json
from pathlib import Path

from making.families import families_page
from making.fields import fields_page
from making.methods import methods_page
from making.pictures import cache_picture, stages_picture
from making.schemas import grid_schema, recipe_schema
from making.settings import arguments_page, arms_page, own_router_page, serving_page

FOLDER = Path(__file__).resolve().parent
PAGES = {
    "methods.md": methods_page,
    "families.md": families_page,
    "data_fields.md": fields_page,
    "evaluation.md": arms_page,
    "plugins.md": arguments_page,
    "own_router.md": own_router_page,
    "serving.md": serving_page,
    "../recipes/recipe.schema.json": lambda: json.dumps(recipe_schema(), indent=0) + "\n",
    "../recipes/grid.schema.json": lambda: json.dumps(grid_schema(), indent=0) + "\n",
    "pictures/cache.svg": cache_picture,
    "pictures/stages.svg": stages_picture,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
