"""What all sections of a recipe are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trivet.recipe.secret import expand, refuse_stored_secrets

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Location = Annotated[str, AfterValidator(expand)]
"""A path or address: `${NAME}` in it is replaced from the environment when the recipe is loaded."""
Free = Annotated[dict[str, Any], AfterValidator(refuse_stored_secrets)]
"""Settings whose keys are another component's; passwords and keys are refused, their names belong here."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are checked on assignment too.

    Types are strict (a text is no number, `yes` is no truth value), so that a slip is an error with a line
    number and not a silent conversion.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_assignment=True,
        validate_default=False,
        protected_namespaces=(),
    )
