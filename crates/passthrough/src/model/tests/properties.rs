//! Whatever happens in whatever order.
