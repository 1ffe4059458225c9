"""The protocol of this project's own services. Code made from it lies beside it; the `.proto` says how it is made."""
