"""Bodies of orders, as both APIs of kvmig take them."""

from pydantic import BaseModel, ConfigDict


class StrictBody(BaseModel):
    """A body that refuses fields that it doesn't have, and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)
