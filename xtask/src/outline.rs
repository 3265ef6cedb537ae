//! What a source declares and which paths it uses, module by module, read with `syn`. Code for tests is left out.
//!
//! Must not know: which file a module lies in, what a path leads to.

use std::collections::BTreeSet;

use anyhow::Result;
use proc_macro2::{Span, TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, UseTree, Visibility};

/// A path as it is written, without generic arguments, and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    /// `["super", "ring", "Ring"]`.
    pub path: Vec<String>,
    /// From 1.
    pub line: usize,
}

/// A name that `use` brings into a module.
#[derive(Debug, Clone)]
pub struct Import {
    /// What it is called here.
    pub name: String,
    /// Where it comes from.
    pub used: Use,
}

/// One module of a file: the file itself, or one that is written out in it.
#[derive(Debug, Default)]
pub struct Module {
    /// Index of the module around it; none for the file itself.
    pub parent: Option<usize>,
    /// Empty for the file itself.
    pub name: String,
    /// Modules with files of their own.
    pub files: Vec<String>,
    /// Names of its items.
    pub items: BTreeSet<String>,
    /// Names from elsewhere.
    pub imports: Vec<Import>,
    /// `use a::*`.
    pub globs: Vec<Use>,
    /// Paths in its code.
    pub paths: Vec<Use>,
    /// Types declared `pub`, in macros, too, with their lines.
    pub types: Vec<(String, usize)>,
}

/// The modules of a source, the file itself first.
pub fn outline(text: &str) -> Result<Vec<Module>> {
    let file = syn::parse_file(text)?;
    let mut reader = Reader { modules: vec![Module::default()], at: 0 };
    if !file.attrs.iter().any(is_test) {
        reader.visit_file(&file);
    }
    Ok(reader.modules)
}

struct Reader {
    modules: Vec<Module>,
    /// The one that is being read.
    at: usize,
}

impl Reader {
    fn here(&mut self) -> &mut Module {
        &mut self.modules[self.at]
    }

    fn used(&mut self, path: Vec<String>, span: Span) {
        let line = span.start().line;
        self.here().paths.push(Use { path, line });
    }

    fn declares(&mut self, name: String, visibility: Option<&Visibility>, span: Span) {
        if matches!(visibility, Some(Visibility::Public(_))) {
            self.here().types.push((name.clone(), span.start().line));
        }
        self.here().items.insert(name);
    }

    fn import(&mut self, tree: &UseTree, before: &mut Vec<String>) {
        let line = tree.span().start().line;
        let mut bring = |path: Vec<String>, name: String| {
            self.modules[self.at].imports.push(Import { name, used: Use { path, line } });
        };
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(&path.tree, before);
                before.pop();
            }
            // `a::{self}` brings `a`.
            UseTree::Name(name) if name.ident == "self" => {
                if let Some(last) = before.last() {
                    bring(before.clone(), last.clone());
                }
            }
            UseTree::Name(name) => bring(with(before, &name.ident), name.ident.to_string()),
            UseTree::Rename(rename) if rename.ident == "self" => {
                bring(before.clone(), rename.rename.to_string());
            }
            UseTree::Rename(rename) => bring(with(before, &rename.ident), rename.rename.to_string()),
            UseTree::Glob(_) => {
                self.here().globs.push(Use { path: before.clone(), line });
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, before);
                }
            }
        }
    }

    /// Paths of two words or more, and declarations of public types, in what only a macro understands.
    fn tokens(&mut self, tokens: TokenStream) {
        let trees: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < trees.len() {
            match &trees[at] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Literal(literal) => self.quoted(literal),
                TokenTree::Ident(_) => {
                    if let [TokenTree::Ident(public), TokenTree::Ident(kind), TokenTree::Ident(name), ..] =
                        &trees[at..]
                        && public == "pub"
                        && ["struct", "enum", "trait", "type"].iter().any(|word| kind == word)
                    {
                        let line = name.span().start().line;
                        self.here().types.push((name.to_string(), line));
                        self.here().items.insert(name.to_string());
                    }
                    let (path, end) = path_at(&trees, at);
                    if path.len() > 1 {
                        self.used(path, trees[at].span());
                    }
                    at = end;
                    continue;
                }
                TokenTree::Punct(_) => {}
            }
            at += 1;
        }
    }

    /// `#[serde(with = "crate::size")]`.
    fn quoted(&mut self, literal: &proc_macro2::Literal) {
        let text = literal.to_string();
        let text = text.trim_matches('"');
        if (text.starts_with("crate::") || text.starts_with("super::"))
            && let Ok(path) = syn::parse_str::<syn::Path>(text)
        {
            self.used(words(&path), literal.span());
        }
    }
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast Item) {
        if attributes(item).iter().any(is_test) {
            return;
        }
        match item {
            Item::Struct(item) => self.declares(item.ident.to_string(), Some(&item.vis), item.ident.span()),
            Item::Enum(item) => self.declares(item.ident.to_string(), Some(&item.vis), item.ident.span()),
            Item::Trait(item) => self.declares(item.ident.to_string(), Some(&item.vis), item.ident.span()),
            Item::Type(item) => self.declares(item.ident.to_string(), Some(&item.vis), item.ident.span()),
            Item::Union(item) => self.declares(item.ident.to_string(), None, item.ident.span()),
            Item::Fn(item) => self.declares(item.sig.ident.to_string(), None, item.sig.ident.span()),
            Item::Const(item) => self.declares(item.ident.to_string(), None, item.ident.span()),
            Item::Static(item) => self.declares(item.ident.to_string(), None, item.ident.span()),
            Item::Macro(syn::ItemMacro { ident: Some(name), .. }) => {
                self.declares(name.to_string(), None, name.span());
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let name = item.ident.to_string();
        let Some((_, items)) = &item.content else {
            self.here().files.push(name);
            return;
        };
        let around = self.at;
        self.modules.push(Module { parent: Some(around), name, ..Module::default() });
        self.at = self.modules.len() - 1;
        for item in items {
            self.visit_item(item);
        }
        self.at = around;
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&item.tree, &mut Vec::new());
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !item.attrs.iter().any(is_test) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    // `pub(crate)` uses nothing.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.used(words(path), path.span());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        visit::visit_macro(self, called);
        self.tokens(called.tokens.clone());
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        // What a comment links to is not used.
        if let Meta::List(list) = &attribute.meta {
            self.tokens(list.tokens.clone());
        }
    }
}

fn with(before: &[String], name: &syn::Ident) -> Vec<String> {
    before.iter().cloned().chain([name.to_string()]).collect()
}

fn words(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// The path that begins with the word at `at`, and the index after it.
fn path_at(trees: &[TokenTree], mut at: usize) -> (Vec<String>, usize) {
    let mut path = Vec::new();
    while let Some(TokenTree::Ident(word)) = trees.get(at) {
        path.push(word.to_string());
        at += 1;
        match &trees[at..] {
            [TokenTree::Punct(a), TokenTree::Punct(b), TokenTree::Ident(_), ..]
                if a.as_char() == ':' && b.as_char() == ':' =>
            {
                at += 2;
            }
            _ => break,
        }
    }
    (path, at)
}

/// `#[cfg(test)]`, `#[cfg(all(test, ...))]`, `#[test]`.
fn is_test(attribute: &Attribute) -> bool {
    match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => {
            let condition = list.tokens.to_string().replace(' ', "");
            condition == "test" || condition.starts_with("all(test,")
        }
        _ => false,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Module {
        outline(text).unwrap().swap_remove(0)
    }

    fn paths(text: &str) -> Vec<String> {
        file(text).paths.into_iter().map(|used| used.path.join("::")).collect()
    }

    #[test]
    fn imports_are_flattened() {
        let module = file("use crate::a::{self, B as C, d::{E, F}};\nuse super::g::*;");
        let imports: Vec<_> =
            module.imports.iter().map(|i| format!("{}={}", i.name, i.used.path.join("::"))).collect();
        assert_eq!(imports, ["a=crate::a", "C=crate::a::B", "E=crate::a::d::E", "F=crate::a::d::F"]);
        assert_eq!(module.globs[0].path, ["super", "g"]);
        assert_eq!(module.globs[0].line, 2);
    }

    #[test]
    fn paths_are_found_wherever_they_stand() {
        assert_eq!(paths("fn a(b: &crate::B<super::C>) {}"), ["crate::B", "super::C"]);
        assert_eq!(paths("fn a() { assert!(matches!(1, crate::b::C)) }"), ["assert", "crate::b::C"]);
        assert_eq!(paths("struct A { #[serde(with = \"crate::b::c\")] d: u8 }"), ["crate::b::c", "u8"]);
        assert_eq!(paths("/// [`crate::b::C`]\npub(crate) struct A;"), [""; 0]);
    }

    #[test]
    fn public_types_are_found_in_macros_too() {
        let module = file("pub struct A;\npub(crate) enum B {}\nmade! { pub enum C {} }\npub fn d() {}");
        assert_eq!(module.types, [("A".into(), 1), ("C".into(), 3)]);
        assert!(["A", "B", "C", "d"].iter().all(|name| module.items.contains(*name)));
    }

    #[test]
    fn tests_are_left_out() {
        let text = "mod a;\n#[cfg(test)]\nmod tests { use crate::b::C; }\n#[cfg(test)]\nmod d;\n#[cfg(test)]\nuse super::e;";
        let modules = outline(text).unwrap();
        assert_eq!(modules.len(), 1);
        assert_eq!(modules[0].files, ["a"]);
        assert!(modules[0].imports.is_empty());
        assert_eq!(outline("#![cfg(test)]\nuse crate::b::C;").unwrap()[0].imports.len(), 0);
    }

    #[test]
    fn a_module_within_a_file_is_one_of_its_own() {
        let modules = outline("mod a { pub struct B; }").unwrap();
        assert_eq!((modules[1].name.as_str(), modules[1].parent), ("a", Some(0)));
        assert!(modules[1].items.contains("B") && !modules[0].items.contains("B"));
    }
}
