"""In-process recovery inside the trainers of other projects, each of which is imported only by the
module of its name."""
