//! The machine on tables of its own.
