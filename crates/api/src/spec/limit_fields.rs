//! The fields of limits: one list for a disk, one for each direction of a NIC. From a list come the fields of the specification, of the forms
//! that make and change, their options and help on the command line, their names, and the way from them to a
//! [`LimitsSpec`](super::LimitsSpec) and back.
//!
//! A list hands its fields to the macro that asks for them, behind what that macro has given it: `[LIMIT BURST: TYPE = VALUE, WHAT THE LIMIT COUNTS,
//! WHAT THE BURST COUNTS]`, first of requests or frames, then of bytes.

/// What the guest of a disk may do.
macro_rules! disk_limits {
    ($to:ident! $($given:tt)*) => {
        $crate::spec::$to! { $($given)*
            [iops_limit iops_burst: u64 = "N",
                "Requests per second that its guest may make", "Requests that may pass at once"]
            [bandwidth_limit bandwidth_burst: $crate::size::Size = "SIZE",
                "Bytes per second that its guest may read and write together", "Bytes that may pass at once"]
        }
    };
}

/// What all clients of an export may do together: its capacity.
macro_rules! export_limits {
    ($to:ident! $($given:tt)*) => {
        $crate::spec::$to! { $($given)*
            [iops_limit iops_burst: u64 = "N",
                "Requests per second that all its clients may make together", "Requests that may pass at once"]
            [bandwidth_limit bandwidth_burst: $crate::size::Size = "SIZE",
                "Bytes per second that all its clients may read and write together", "Bytes that may pass at once"]
        }
    };
}

/// What the guest of a NIC may send.
macro_rules! tx_limits {
    ($to:ident! $($given:tt)*) => {
        $crate::spec::$to! { $($given)*
            [tx_frame_limit tx_frame_burst: u64 = "N",
                "Frames per second that its guest may send", "Frames that it may send at once"]
            [tx_bandwidth_limit tx_bandwidth_burst: $crate::size::Size = "SIZE",
                "Bytes per second that its guest may send", "Bytes that it may send at once"]
        }
    };
}

/// What the guest of a NIC may receive.
macro_rules! rx_limits {
    ($to:ident! $($given:tt)*) => {
        $crate::spec::$to! { $($given)*
            [rx_frame_limit rx_frame_burst: u64 = "N",
                "Frames per second that its guest may receive", "Frames that it may receive at once"]
            [rx_bandwidth_limit rx_bandwidth_burst: $crate::size::Size = "SIZE",
                "Bytes per second that its guest may receive", "Bytes that it may receive at once"]
        }
    };
}

/// A struct with the limits of some lists behind its other fields, written by the macro `$make`: a form that makes something, a form or a body
/// that changes it, or a specification.
macro_rules! limited {
    ($make:ident! $kind:ident [] { $($head:tt)* } { $($fields:tt)* }) => {
        $make! { $($head)* { $($fields)* } }
    };
    ($make:ident! $kind:ident [$list:ident $($lists:ident)*] $head:tt $fields:tt) => {
        $crate::spec::$list! { limited! @$kind $make [$($lists)*] $head $fields }
    };
    (@form $make:ident $lists:tt $head:tt { $($fields:tt)* }
        $([$limit:ident $burst:ident: $kind:ty = $value:literal, $limited:literal, $passing:literal])*) => {
        $crate::spec::limited! { $make! form $lists $head { $($fields)* $(
            #[doc = concat!($limited, "; 0 for no limit [default: no limit]")]
            [long, value_name = $value, help = concat!($limited, "; 0 for no limit [default: no limit]")]
            $limit: $kind,
            #[doc = concat!($passing, " after a pause [default: a tenth of a second's]")]
            [long, value_name = $value, help = concat!($passing, " after a pause [default: a tenth of a second's]")]
            $burst: $kind,
        )* } }
    };
    (@change $make:ident $lists:tt $head:tt { $($fields:tt)* }
        $([$limit:ident $burst:ident: $kind:ty = $value:literal, $limited:literal, $passing:literal])*) => {
        $crate::spec::limited! { $make! change $lists $head { $($fields)* $(
            #[doc = concat!($limited, "; 0 for no limit")]
            [long, value_name = $value, help = concat!($limited, "; 0 for no limit")]
            $limit: $kind,
            #[doc = concat!($passing, " after a pause")]
            [long, value_name = $value, help = concat!($passing, " after a pause")]
            $burst: $kind,
        )* } }
    };
    (@body $make:ident $lists:tt $head:tt { $($fields:tt)* }
        $([$limit:ident $burst:ident: $kind:ty = $value:literal, $limited:literal, $passing:literal])*) => {
        $crate::spec::limited! { $make! body $lists $head { $($fields)* $(
            #[doc = concat!($limited, "; 0 for no limit.")]
            #[serde(skip_serializing_if = "Option::is_none")]
            $limit: Option<$kind>,
            #[doc = concat!($passing, " after a pause.")]
            #[serde(skip_serializing_if = "Option::is_none")]
            $burst: Option<$kind>,
        )* } }
    };
    (@spec $make:ident $lists:tt $head:tt { $($fields:tt)* }
        $([$limit:ident $burst:ident: $kind:ty = $value:literal, $limited:literal, $passing:literal])*) => {
        $crate::spec::limited! { $make! spec $lists $head { $($fields)* $(
            #[doc = concat!($limited, ", if they are limited.")]
            #[serde(default, skip_serializing_if = "Option::is_none")]
            $limit: Option<$kind>,
            #[doc = concat!($passing, " after a pause.")]
            #[serde(default, skip_serializing_if = "Option::is_none")]
            $burst: Option<$kind>,
        )* } }
    };
}

/// The limits that the fields of a list hold in `$of`.
macro_rules! limits_of {
    ($list:ident of $of:ident) => {
        $crate::spec::$list! { limits_of! @$of }
    };
    (@$of:ident
        [$rate:ident $rate_burst:ident $($rates:tt)*] [$bandwidth:ident $bandwidth_burst:ident $($bandwidths:tt)*]) => {
        $crate::spec::LimitsSpec {
            rate: $of.$rate,
            rate_burst: $of.$rate_burst,
            bandwidth: $of.$bandwidth,
            bandwidth_burst: $of.$bandwidth_burst,
        }
    };
}

/// A struct whose fields of some lists are these limits.
macro_rules! with_limits {
    ($name:ident { $($fields:tt)* }) => {
        $name { $($fields)* }
    };
    ($name:ident { $($fields:tt)* }, $list:ident = $limits:ident $($others:tt)*) => {
        $crate::spec::$list! { with_limits! @$limits { $($others)* } $name { $($fields)* } }
    };
    (@$limits:ident { $($others:tt)* } $name:ident { $($fields:tt)* }
        [$rate:ident $rate_burst:ident $($rates:tt)*] [$bandwidth:ident $bandwidth_burst:ident $($bandwidths:tt)*]) => {
        $crate::spec::with_limits! {
            $name {
                $rate: $limits.rate,
                $rate_burst: $limits.rate_burst,
                $bandwidth: $limits.bandwidth,
                $bandwidth_burst: $limits.bandwidth_burst,
                $($fields)*
            }
            $($others)*
        }
    };
}

/// Puts limits into the fields of a list.
macro_rules! set_limits {
    ($list:ident of $of:ident = $limits:ident) => {
        $crate::spec::$list! { set_limits! @$of $limits }
    };
    (@$of:ident $limits:ident
        [$rate:ident $rate_burst:ident $($rates:tt)*] [$bandwidth:ident $bandwidth_burst:ident $($bandwidths:tt)*]) => {
        ($of.$rate, $of.$rate_burst) = ($limits.rate, $limits.rate_burst);
        ($of.$bandwidth, $of.$bandwidth_burst) = ($limits.bandwidth, $limits.bandwidth_burst);
    };
}

/// The names of the fields of a list.
macro_rules! limit_names {
    ($list:ident) => {
        $crate::spec::$list! { limit_names! @ }
    };
    (@ [$rate:ident $rate_burst:ident $($rates:tt)*] [$bandwidth:ident $bandwidth_burst:ident $($bandwidths:tt)*]) => {
        [stringify!($rate), stringify!($rate_burst), stringify!($bandwidth), stringify!($bandwidth_burst)]
    };
}

pub(crate) use {
    disk_limits, export_limits, limit_names, limited, limits_of, rx_limits, set_limits, tx_limits,
    with_limits,
};
