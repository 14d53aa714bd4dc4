//! The macro that declares options: as fields of a struct, and as rows.

use super::rows::{Row, FLAG};

/// Generates a struct of options, with their rows. A row has its group and its help as attributes,
/// its name, its short name after a slash or another long name after `or`, and its type. It is an
/// operand unless it has a kind of value in parentheses, with the function that converts the value;
/// without such a function, argh converts it. A `bool` takes yes or no, and is false by default.
/// What follows may be another default, environment variables, the feature that it needs, whether
/// it is hidden, its value if it is given alone, and what it does instead of what its help says.
/// The rows of another struct stand before a row that follows `with`, perhaps under a heading, or
/// at the end after `then`.
macro_rules! options {
    (@form bool) => { $crate::shared::cli::rows::Form::Switch("bool") };
    (@form Option bool) => { $crate::shared::cli::rows::Form::Switch("bool") };
    (@form IfGiven $type:ident $value:literal) => {
        $crate::shared::cli::rows::Form::Switch($value)
    };
    (@form $($type:ident)+ $value:literal) => { $crate::shared::cli::rows::Form::Valued($value) };
    (@form $($type:ident)+) => { $crate::shared::cli::rows::Form::Operand };

    (@times Vec) => { $crate::shared::cli::rows::Times::Any };
    (@times Option) => { $crate::shared::cli::rows::Times::AtMostOnce };
    (@times bool $($default:tt)?) => { $crate::shared::cli::rows::Times::AtMostOnce };
    (@times $type:ident $default:tt) => { $crate::shared::cli::rows::Times::AtMostOnce };
    (@times $type:ident) => { $crate::shared::cli::rows::Times::Once };

    (@parser bool) => { $crate::shared::cli::values::yes_or_no };
    (@parser Option bool) => { $crate::shared::cli::values::yes_or_no };
    (@parser $($type:ident)+ = $parse:expr) => { $parse };
    (@parser $($type:ident)+) => { argh::FromArgValue::from_arg_value };

    (@off bool) => { |is_on| !is_on };
    (@off Unless) => { Option::is_none };
    (@off $type:ident) => { |_| false };

    (@read $line:ident Vec $($arguments:tt)+) => { $line.values($($arguments)+) };
    (@read $line:ident $type:ident $($arguments:tt)+) => { $line.value($($arguments)+) };

    (@of $value:ident Vec) => { $value };
    (@of $value:ident Option) => { $value };
    (@of $value:ident bool) => { $value.unwrap_or(false) };
    (@of $value:ident $type:ident $default:tt) => { $value.unwrap_or_else(|| $default) };
    (@of $value:ident $type:ident) => { $value? };

    (
        $(#[doc = $about:tt])+
        $(#[command = $command:literal])?
        $vis:vis struct $name:ident $(-- $tail:literal)? {
            $(
                $(with $before:ident: $group:ident $(under $heading:literal)?,)*
                $(#[group = $title:literal])?
                $(#[doc = $help:tt])+
                $field:ident $(named $long:literal)? $(/ $short:tt)? $(or $other:literal)?:
                    $type:ident $(<$inner:ident>)? $(($value:literal $(, $parse:expr)?))?
                    $(else $default:tt)? $(= [$($variable:literal),*])? $(in $feature:ident)?
                    $(as $hidden:ident)? $(alone $alone:tt)? $(=> $effect:ident ($why:literal))?,
            )*
            $(then $last:ident: $end:ident,)*
        }
    ) => {
        #[derive(Debug)]
        $(#[doc = $about])+
        $vis struct $name {
            $(
                $($vis $before: $group,)*
                $(#[doc = $help])+
                $(#[allow(dead_code, reason = $why)])?
                $vis $field: $type $(<$inner>)?,
            )*
            $($vis $last: $end,)*
        }

        impl $crate::shared::cli::arguments::FromRows for $name {
            const COMMAND: $crate::shared::cli::rows::CommandRow = {
                use $crate::shared::cli::{options, rows};
                const GROUPS: &[options::RowGroup] = &[
                    $(
                        $((
                            options::first(&[$(Some($heading),)? None]),
                            <$group as $crate::shared::cli::arguments::FromRows>::COMMAND.rows,
                        ),)*
                        (options::first(&[$(Some($title),)? None]), &[rows::Row {
                            name: options::first(&[$($long,)? stringify!($field)]),
                            other: options::first(&[
                                $(Some(concat!("-", $short)),)?
                                $(Some(concat!("--", $other)),)?
                                None,
                            ]),
                            form: options::options!(@form $type $($inner)? $($value)?),
                            times: options::options!(@times $type $($default)?),
                            about: concat!($($help),+).trim_ascii_start(),
                            variables: &[$($($variable),*)?],
                            feature: options::first(&[$(Some(rows::$feature),)? None]),
                            is_hidden: options::first(&[$(rows::$hidden,)? false]),
                            alone: options::first(&[$(Some($alone),)? None]),
                            effect: options::first(&[
                                $(rows::Effect::$effect($why),)?
                                rows::Effect::AsSaid,
                            ]),
                            ..rows::FLAG
                        }]),
                    )*
                    $((None, <$end as $crate::shared::cli::arguments::FromRows>::COMMAND.rows),)*
                ];
                rows::CommandRow {
                    name: options::first(&[$($command,)? ""]),
                    about: concat!($($about),+).trim_ascii_start(),
                    tail: options::first(&[$($tail,)? ""]),
                    rows: &options::joined::<{ options::count(GROUPS) }>(GROUPS),
                }
            };

            fn from_line(line: &mut $crate::shared::cli::arguments::CommandLine) -> Option<$name> {
                $(
                    $(let $before = $crate::shared::cli::arguments::FromRows::from_line(line);)*
                    let $field = $crate::shared::cli::options::options!(@read line $type
                        $crate::shared::cli::options::first(&[$($long,)? stringify!($field)]),
                        $crate::shared::cli::options::options!(
                            @parser $type $($inner)? $($(= $parse)?)?
                        ),
                        $crate::shared::cli::options::options!(@off $type)
                    );
                )*
                $(let $last = $crate::shared::cli::arguments::FromRows::from_line(line);)*
                Some($name {
                    $(
                        $($before: $before?,)*
                        $field: $crate::shared::cli::options::options!(
                            @of $field $type $($default)?
                        ),
                    )*
                    $($last: $last?,)*
                })
            }
        }
    };
}
pub(crate) use options;

/// Rows, and another heading for the first one.
pub type RowGroup = (Option<&'static str>, &'static [Row]);

/// The number of rows in all groups, for the macro.
pub const fn count(groups: &[RowGroup]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < groups.len() {
        count += groups[at].1.len();
        at += 1;
    }
    count
}

/// The rows of all groups, for the macro.
pub const fn joined<const COUNT: usize>(mut groups: &[RowGroup]) -> [Row; COUNT] {
    let (mut rows, mut at) = ([FLAG; COUNT], 0);
    while let [(heading, group), rest @ ..] = groups {
        let (mut number, start) = (0, at);
        while number < group.len() {
            rows[at] = group[number];
            (number, at) = (number + 1, at + 1);
        }
        if heading.is_some() {
            rows[start].group = *heading;
        }
        groups = rest;
    }
    rows
}

/// The first element of `all`, for the macro.
pub const fn first<T: Copy>(all: &[T]) -> T {
    all[0]
}

/// The type of an option whose value is optional, and can be given only after an equals sign.
pub type IfGiven<T> = T;

/// The type of an option that is `None` if its value is 0 or off. `Option` means that the option
/// may be missing.
pub type Unless<T> = Option<T>;
